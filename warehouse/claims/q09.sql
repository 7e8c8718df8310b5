-- id: q09
-- statement: The exponent that AWQ finds lies between 0.3 and 0.7 in most layers.
-- published: 0.3 to 0.7 in most layers
-- source: Efficient inference and compression (articles in Chinese), part 3; Lin et al. 2023, arXiv:2306.00978
-- kind: measured
-- metric: share of the searched pairs of layers whose exponent lies between 0.3 and 0.7
-- direction: above
-- threshold: 0.5
-- experiment: quantization
-- note: One exponent is searched for the layers that read the same channels. A pair for which no scale beats 1 counts as outside, as exponent 0.
WITH RECURSIVE made AS (
    SELECT experiment, base, checkpoint_digest AS digest FROM current_variant
    UNION
    SELECT m.experiment, m.base, l.parent_digest FROM made AS m JOIN lineage AS l ON l.artifact_digest = m.digest AND l.role = 'parent'
), searched AS (
    SELECT m.experiment, m.base, s.summary_json
    FROM made AS m JOIN step AS s ON s.artifact_digest = m.digest AND s.kind = 'smooth' AND json_valid(s.spec_json) AND json_valid(s.summary_json)
    WHERE s.spec_json ->> '$.method' = 'awq' AND coalesce(s.spec_json ->> '$.salience', 'inputs') = 'inputs'
), exponent AS (
    SELECT experiment, base, coalesce(TRY_CAST(unnest(json_extract_string(summary_json, '$.pairs.*.alpha')) AS DOUBLE), 0) AS alpha FROM searched
)
SELECT
    experiment, base, avg(CAST(alpha BETWEEN 0.3 AND 0.7 AS INTEGER)) AS value, sqrt(value * (1 - value) / count(*)) AS error, count(*) AS n,
    format('mean {:.2f}, standard deviation {:.2f}, from {:.2f} to {:.2f}', avg(alpha), coalesce(stddev_samp(alpha), 0), min(alpha), max(alpha)) AS detail
FROM exponent GROUP BY experiment, base;
