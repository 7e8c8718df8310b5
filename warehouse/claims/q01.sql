-- id: q01
-- statement: Rounding has the error variance Δ² / 12, so that one bit less makes it four times as large, and INT4 has 256 times that of INT8.
-- published: 4 times a bit
-- source: Efficient inference and compression (articles in Chinese), part 3; Bennett 1948, doi:10.1002/j.1538-7305.1948.tb01340.x
-- kind: exact
-- metric: factor in error variance a bit less; measured: of the same weights in adjacent widths, mean over layers
-- direction: between
-- threshold: 3.5 4.5
-- experiment: quantization
-- note: Symmetric codes lose one level, 127 to 7 and not 128 to 8, which is 4.26 a bit and within the rounding of the published 4.
SELECT 'arithmetic' AS experiment, 2.0 ** 2 AS value, 0 AS error, 1 AS n, 'the step doubles' AS detail
UNION ALL BY NAME
SELECT
    experiment, base, avg(ratio) AS value, stddev_samp(ratio) / sqrt(count(*)) AS error, count(*) AS n,
    string_agg(DISTINCT pair, ', ') AS detail
FROM (
    SELECT
        a.experiment, a.base, a.format || ' to ' || b.format AS pair, 10 ** ((x.value - y.value) / 10 / (a.bits - b.bits)) AS ratio
    FROM made_of AS a
    JOIN made_of AS b
        ON b.experiment = a.experiment AND b.group_size = a.group_size AND b.is_symmetric = a.is_symmetric AND b.bits < a.bits AND b.kinds = 'quantize'
        AND b.quantize_method = 'rtn' AND b.weight_range = 'minmax' AND b.format LIKE 'int%' AND b.inputs_format IS NULL
    JOIN by_slice AS x ON x.experiment = a.experiment AND x.variant = a.variant AND x.metric = 'snr_db' AND x.slice_kind = 'layer'
    JOIN by_slice AS y
        ON y.experiment = b.experiment AND y.variant = b.variant AND y.metric = 'snr_db' AND y.slice_kind = 'layer' AND y.slice = x.slice
    WHERE a.kinds = 'quantize' AND a.quantize_method = 'rtn' AND a.weight_range = 'minmax' AND a.format LIKE 'int%' AND a.inputs_format IS NULL
    AND x.value IS NOT NULL AND y.value IS NOT NULL
) AS rounded
GROUP BY experiment, base;
