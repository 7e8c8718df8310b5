-- id: d04
-- statement: A draft's later proposals of a round are accepted less often than its first.
-- published: 0.8 at the first, 0.5 at the fifth (EAGLE)
-- source: Li et al. 2024, arXiv:2401.15077
-- kind: measured
-- metric: acceptance of the first proposal less that of the last one up to the fifth, where reached, mean over variants whose draft is a model and protocols
-- direction: above
-- threshold: 0
-- experiment: speculation
WITH place AS (
    SELECT s.experiment, s.base, s.variant, s.protocol_digest, TRY_CAST(s.slice AS BIGINT) AS seat, s.value, s.standard_error, s.n
    FROM by_slice AS s JOIN made_of AS m ON m.experiment = s.experiment AND m.variant = s.variant
    WHERE s.metric = 'acceptance_rate' AND s.slice_kind = 'position' AND s.status = 'ok' AND m.draft_method = 'variant' AND TRY_CAST(s.slice AS BIGINT) <= 5
), ends AS (
    SELECT
        experiment, base, variant, protocol_digest, arg_min(value, seat) AS first, arg_max(value, seat) AS last, max(seat) AS seat, sum(n) AS n,
        difference_error(arg_min(standard_error, seat), arg_max(standard_error, seat)) AS error
    FROM place GROUP BY experiment, base, variant, protocol_digest HAVING min(seat) = 1 AND max(seat) > 1
)
SELECT
    experiment, base, avg(first - last) AS value, mean_error(error) AS error, sum(n) AS n,
    format('{:.3f} at the first, {:.3f} at the last of up to {}', avg(first), avg(last), max(seat)) AS detail
FROM ends GROUP BY experiment, base;
