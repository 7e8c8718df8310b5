-- id: s08
-- statement: The answer that most samples give is right more often than a single sample.
-- published: 56.5 to 74.4 % (GSM8K, PaLM 540B, 40 samples)
-- source: Wang et al. 2022, arXiv:2203.11171
-- kind: measured
-- metric: maj@k of the largest k less pass@1, at the temperature nearest to 0.7
-- direction: above
-- threshold: 0
-- experiment: protocols
WITH answer AS (
    SELECT
        s.experiment, s.base, s.protocol_digest, s.metric, TRY_CAST(split_part(s.slice, '/', 1) AS DOUBLE) AS temperature,
        TRY_CAST(split_part(s.slice, '/', 2) AS BIGINT) AS k, s.value, s.standard_error, s.n
    FROM by_slice AS s JOIN made_of AS m ON m.experiment = s.experiment AND m.variant = s.variant
    WHERE s.metric IN ('pass_at_1', 'majority_at_k') AND s.slice_kind IN ('temperature', 'temperature_k') AND s.status = 'ok' AND m.kinds = ''
)
SELECT
    one.experiment, one.base, many.value - one.value AS value, difference_error(many.standard_error, one.standard_error) AS error, one.n,
    format('at {:g}: {:.3f} alone, {:.3f} by the vote of {}', one.temperature, one.value, many.value, many.k) AS detail
FROM answer AS one
JOIN answer AS many
    ON many.experiment = one.experiment AND many.base = one.base AND many.protocol_digest = one.protocol_digest AND many.temperature = one.temperature
WHERE one.metric = 'pass_at_1' AND one.k IS NULL AND many.metric = 'majority_at_k' AND many.k > 1 AND one.temperature > 0
QUALIFY row_number() OVER (PARTITION BY one.experiment, one.base ORDER BY abs(one.temperature - 0.7), many.k DESC, one.n DESC, one.protocol_digest) = 1;
