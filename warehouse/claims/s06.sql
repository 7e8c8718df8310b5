-- id: s06
-- statement: One sample is right most often at a low temperature, the best of many at a middle or high one.
-- published: best pass@1 near 0.2, best pass@100 near 0.8 (Codex on HumanEval)
-- source: Chen et al. 2021, arXiv:2107.03374
-- kind: measured
-- metric: the smaller of two gains: pass@1 at the temperature nearest to 0.2 over that nearest to 0.8, and pass@k, of the largest k, the other way round
-- direction: above
-- threshold: 0
-- experiment: protocols
-- note: On generated arithmetic, with fewer samples than the published hundred. Temperature 0 has one sample and is left out.
WITH answer AS (
    SELECT
        s.experiment, s.base, s.protocol_digest, s.metric, TRY_CAST(split_part(s.slice, '/', 1) AS DOUBLE) AS temperature,
        TRY_CAST(split_part(s.slice, '/', 2) AS BIGINT) AS k, s.value, s.standard_error, s.n
    FROM by_slice AS s JOIN made_of AS m ON m.experiment = s.experiment AND m.variant = s.variant
    WHERE s.metric IN ('pass_at_1', 'pass_at_k') AND s.slice_kind IN ('temperature', 'temperature_k') AND s.status = 'ok' AND m.kinds = ''
    QUALIFY temperature > 0 AND k IS NOT DISTINCT FROM max(k) OVER (PARTITION BY s.experiment, s.base, s.protocol_digest, s.metric)
), chosen AS (
    SELECT
        experiment, base, protocol_digest, metric, any_value(k) AS k, max(n) AS n,
        arg_min(temperature, abs(temperature - 0.2)) AS low, arg_min(temperature, abs(temperature - 0.8)) AS high,
        arg_min(value, abs(temperature - 0.2)) AS at_low, arg_min(value, abs(temperature - 0.8)) AS at_high,
        difference_error(arg_min(standard_error, abs(temperature - 0.2)), arg_min(standard_error, abs(temperature - 0.8))) AS error
    FROM answer GROUP BY experiment, base, protocol_digest, metric HAVING low < high
), gain AS (
    SELECT one.*, one.at_low - one.at_high AS one_gain, many.at_high - many.at_low AS many_gain, many.error AS many_error, many.k AS samples
    FROM chosen AS one
    JOIN chosen AS many ON many.experiment = one.experiment AND many.base = one.base AND many.protocol_digest = one.protocol_digest
    WHERE one.metric = 'pass_at_1' AND many.metric = 'pass_at_k' AND many.k > 1
)
SELECT
    experiment, base, least(one_gain, many_gain) AS value, CASE WHEN one_gain <= many_gain THEN error ELSE many_error END AS error, n,
    format('pass@1 {:+.3f} from {:g} to {:g}; pass@{} {:+.3f}', -one_gain, low, high, samples, many_gain) AS detail
FROM gain
QUALIFY row_number() OVER (PARTITION BY experiment, base ORDER BY n DESC, protocol_digest) = 1;
