-- id: s05
-- statement: At a high temperature top-p lets the tail in, and min-p does not.
-- published: qualitative
-- source: Nguyen et al. 2024, arXiv:2407.01082
-- kind: measured
-- metric: tail mass that top-p keeps less what min-p keeps, mean over their strengths, at the highest temperature, beyond the most tokens counted
-- direction: above
-- threshold: 0
-- experiment: sampling
WITH kept AS (
    SELECT
        s.experiment, s.base, s.protocol_digest, split_part(s.slice, ' ', 1) AS filter, TRY_CAST(split_part(s.slice, '/', 2) AS DOUBLE) AS temperature,
        TRY_CAST(split_part(s.slice, '/', 3) AS BIGINT) AS k, s.value, s.standard_error, s.n
    FROM by_slice AS s JOIN made_of AS m ON m.experiment = s.experiment AND m.variant = s.variant
    WHERE s.metric = 'kept_tail_mass' AND s.slice_kind = 'filter_temperature_k' AND s.status = 'ok' AND m.kinds = ''
    QUALIFY temperature = max(temperature) OVER (PARTITION BY s.experiment, s.base, s.protocol_digest)
    AND k = max(k) OVER (PARTITION BY s.experiment, s.base, s.protocol_digest)
)
SELECT
    experiment, base, avg(value) FILTER (filter = 'top_p') - avg(value) FILTER (filter = 'min_p') AS value,
    difference_error(avg(standard_error) FILTER (filter = 'top_p'), avg(standard_error) FILTER (filter = 'min_p')) AS error,
    max(n) AS n,
    format('at {:g}, beyond {} tokens: top-p {:.3g}, min-p {:.3g}', any_value(temperature), any_value(k), avg(value) FILTER (filter = 'top_p'), avg(value) FILTER (filter = 'min_p')) AS detail
FROM kept
GROUP BY experiment, base, protocol_digest
QUALIFY row_number() OVER (PARTITION BY experiment, base ORDER BY protocol_digest) = 1;
