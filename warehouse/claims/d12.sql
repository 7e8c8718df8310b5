-- id: d12
-- statement: The speed-ups of quantization and of speculation do not multiply.
-- published: qualitative
-- source: Efficient inference and compression (articles in Chinese), parts 2 and 3
-- kind: measured
-- metric: logarithm of the speed-up of both less the sum of those of each, mean over pairs
-- direction: below
-- threshold: 0
-- experiment: speculation
WITH timed AS (
    SELECT
        experiment, base, variant, kinds, steps, but_draft, but_quantize, value, standard_error / value AS error, status, base_value, base_status,
        base_standard_error / base_value AS base_error
    FROM compared WHERE metric = 'decode_tok_s' AND value > 0 AND base_value > 0
), whole AS (
    SELECT
        b.experiment, b.base, b.variant, ln(b.value / q.value) - ln(d.value / d.base_value) AS excess,
        sqrt(b.error ** 2 + q.error ** 2 + d.error ** 2 + d.base_error ** 2) AS error, 'noisy' IN (b.status, q.status, d.status, d.base_status) AS noisy
    FROM timed AS b
    JOIN timed AS q ON q.experiment = b.experiment AND q.kinds = 'quantize' AND q.steps = b.but_draft
    JOIN timed AS d ON d.experiment = b.experiment AND d.kinds = 'draft' AND d.steps = b.but_quantize
    WHERE b.kinds = 'quantize draft'
)
SELECT
    experiment, base, avg(excess) AS value, mean_error(error) AS error, count(*) AS n,
    CASE WHEN bool_or(noisy) THEN 'a timing was noisy' END AS reason,
    string_agg(format('{} {:+.3f}', variant, excess), ', ' ORDER BY variant) AS detail
FROM whole GROUP BY experiment, base;
