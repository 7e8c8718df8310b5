-- id: p01
-- statement: A block changes the direction of its input little in the middle and later layers: their cosine is 0.85 to 0.95, 0.3 to 0.6 in the first.
-- published: 0.85 to 0.95
-- source: Men et al. 2024, ShortGPT, arXiv:2403.03853
-- kind: measured
-- metric: mean cosine of input and output over the blocks of the second half but the last, of the base
-- direction: between
-- threshold: 0.85 0.95
-- experiment: outliers
-- note: The interval is over blocks. The published range of the first blocks, 0.3 to 0.6, is told beside it.
WITH block AS (
    SELECT
        s.experiment, s.base, s.value, row_number() OVER of_model AS place, count(*) OVER (PARTITION BY s.experiment, s.base) AS blocks
    FROM by_slice AS s
    JOIN made_of AS m ON m.experiment = s.experiment AND m.variant = s.variant
    WHERE s.metric = 'block_cosine' AND s.slice_kind = 'layer' AND s.status = 'ok' AND m.kinds = ''
    WINDOW of_model AS (PARTITION BY s.experiment, s.base ORDER BY TRY_CAST(regexp_extract(s.slice, '([0-9]+)$', 1) AS BIGINT))
)
SELECT
    experiment, base, avg(value) FILTER (place > blocks / 2 AND place < blocks) AS value,
    stddev_samp(value) FILTER (place > blocks / 2 AND place < blocks) / sqrt(count(*) FILTER (place > blocks / 2 AND place < blocks)) AS error,
    count(*) FILTER (place > blocks / 2 AND place < blocks) AS n,
    format('first {:.2f}, second {:.2f}, last {:.2f}', max(value) FILTER (place = 1), max(value) FILTER (place = 2), max(value) FILTER (place = blocks)) AS detail
FROM block
GROUP BY experiment, base
HAVING n > 1;
