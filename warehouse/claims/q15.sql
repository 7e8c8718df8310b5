-- id: q15
-- statement: First and last layers and the projections o and down are the ones that rounding harms most.
-- published: qualitative
-- source: Efficient inference and compression (articles in Chinese), part 3
-- kind: measured
-- metric: relative output error of those layers over that of the others, mean over 4-bit variants
-- direction: above
-- threshold: 1
-- experiment: quantization
-- note: The error of a layer's own output; what it does to the model's is not measured layer by layer.
WITH layer AS (
    SELECT
        s.experiment, s.base, s.variant, s.value, TRY_CAST(regexp_extract(s.slice, '[.](\d+)[.]', 1) AS BIGINT) AS block,
        regexp_matches(s.slice, '(o_proj|down_proj)$') AS named
    FROM by_slice AS s JOIN made_of AS m ON m.experiment = s.experiment AND m.variant = s.variant
    WHERE s.metric = 'output_error' AND s.slice_kind = 'layer' AND s.value IS NOT NULL AND m.bits = 4 AND m.kinds = 'quantize'
), sorted AS (
    SELECT *, named OR block = 0 OR block = max(block) OVER (PARTITION BY experiment, variant) OR block IS NULL AS sensitive FROM layer
), part AS (
    SELECT experiment, base, variant, sensitive, avg(value) AS mean, stddev_samp(value) / sqrt(count(*)) AS error, count(*) AS n
    FROM sorted GROUP BY experiment, base, variant, sensitive
)
SELECT
    a.experiment, a.base, avg(a.mean / b.mean) AS value, mean_error(ratio_error(a.mean, a.error, b.mean, b.error)) AS error, sum(a.n + b.n) AS n,
    format('{} variants', count(*)) AS detail
FROM part AS a JOIN part AS b ON b.experiment = a.experiment AND b.variant = a.variant AND NOT b.sensitive
WHERE a.sensitive AND b.mean > 0
GROUP BY a.experiment, a.base;
