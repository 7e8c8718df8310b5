-- id: d11
-- statement: Speculation stops paying at large batches.
-- published: qualitative
-- source: Efficient inference and compression (articles in Chinese), part 2
-- kind: measured
-- metric: speed-up at the largest batch over that at batch 1, mean over drafts
-- direction: below
-- threshold: 1
-- experiment: speculation
WITH timed AS (
    SELECT experiment, base, variant, protocol_digest, TRY_CAST(slice AS BIGINT) AS batch, value, standard_error, status, n
    FROM by_slice WHERE metric = 'measured_speedup' AND slice_kind = 'batch' AND value > 0
), ends AS (
    SELECT
        experiment, base, variant, protocol_digest, max(batch) AS batch, arg_max(value, batch) / arg_min(value, batch) AS ratio,
        ratio_error(arg_max(value, batch), arg_max(standard_error, batch), arg_min(value, batch), arg_min(standard_error, batch)) AS error,
        bool_or(status <> 'ok') AS noisy
    FROM timed GROUP BY experiment, base, variant, protocol_digest HAVING min(batch) = 1 AND max(batch) > 1
)
SELECT
    experiment, base, avg(ratio) AS value, mean_error(error) AS error, count(*) AS n,
    CASE WHEN bool_or(noisy) THEN 'a timing was noisy' END AS reason, format('batch {} against 1; from {:.2f} to {:.2f}', max(batch), min(ratio), max(ratio)) AS detail
FROM ends GROUP BY experiment, base;
