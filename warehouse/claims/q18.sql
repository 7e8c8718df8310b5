-- id: q18
-- statement: On Gaussian weights NF4 has about 30 % less squared error than uniform INT4.
-- published: 30 % less
-- source: Efficient inference and compression (articles in Chinese), part 4; Dettmers et al. 2023, arXiv:2305.14314, for NF4
-- kind: exact
-- metric: 1 − squared error of NF4 over that of INT4, in groups of 64 that share their largest value; measured: of our weights, mean over layers
-- direction: between
-- threshold: 0.25 0.35
-- experiment: quantization
-- note: Against the 16 even levels of int4 here and in compressed-tensors, 20 %; against the 15 of those that leave the lowest code unused, 27 %. The longer the group, the more.
WITH nf4 AS (
    SELECT unnest([
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0
    ]) AS level
), edge AS (
    SELECT level, (lag(level) OVER (ORDER BY level) + level) / 2 AS low FROM nf4
), share AS (  -- of a group's largest value, with what either codebook makes of it
    SELECT u, (u - level) ** 2 AS nf4, (u - least(round(u * 7.5), 7) / 7.5) ** 2 AS int4
    FROM (SELECT (i + 0.5) / 200 - 1 AS u FROM range(400) AS places (i)) AS place ASOF JOIN edge ON u >= coalesce(low, -2)
), largest AS (  -- of the 64: its density is that of φ(m) · (2 Φ(m) − 1)^63, and the others are normal within it
    SELECT m, exp(-(m ** 2) / 2) * (sum(exp(-(m ** 2) / 2) * 0.02) OVER (ORDER BY m)) ** 63 AS weight
    FROM (SELECT i / 50.0 + 0.01 AS m FROM range(300) AS sizes (i)) AS size
), chosen AS (
    SELECT m, weight FROM largest WHERE weight > (SELECT max(weight) FROM largest) / 1000
)
SELECT  -- the largest itself is a level of NF4, and half a step off in INT4
    'arithmetic' AS experiment, 1 - 63 * sum(weight * m ** 2 * nf4) / sum(weight * m ** 2 * (63 * int4 + 1 / 225.0)) AS value, 0 AS error, 64 AS n,
    'groups of 64' AS detail
FROM (
    SELECT
        m, weight, sum(exp(-((u * m) ** 2) / 2) * nf4) / sum(exp(-((u * m) ** 2) / 2)) AS nf4,
        sum(exp(-((u * m) ** 2) / 2) * int4) / sum(exp(-((u * m) ** 2) / 2)) AS int4
    FROM chosen, share GROUP BY m, weight
) AS within
UNION ALL BY NAME
SELECT
    a.experiment, a.base, avg(1 - 10 ** ((y.value - x.value) / 10)) AS value, stddev_samp(10 ** ((y.value - x.value) / 10)) / sqrt(count(*)) AS error,
    count(*) AS n, format('groups of {}', any_value(a.group_size)) AS detail
FROM made_of AS a
JOIN made_of AS b
    ON b.experiment = a.experiment AND b.group_size = a.group_size AND b.format = 'int4' AND b.kinds = 'quantize' AND b.is_symmetric
    AND b.quantize_method = 'rtn' AND b.weight_range = 'minmax' AND b.inputs_format IS NULL
JOIN by_slice AS x ON x.experiment = a.experiment AND x.variant = a.variant AND x.metric = 'snr_db' AND x.slice_kind = 'layer'
JOIN by_slice AS y ON y.experiment = b.experiment AND y.variant = b.variant AND y.metric = 'snr_db' AND y.slice_kind = 'layer' AND y.slice = x.slice
WHERE a.format = 'nf4' AND a.kinds = 'quantize' AND a.weight_range = 'minmax' AND x.value IS NOT NULL AND y.value IS NOT NULL
AND NOT contains(a.quantize, '"nested":true')
GROUP BY a.experiment, a.base;
