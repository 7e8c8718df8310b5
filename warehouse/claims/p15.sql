-- id: p15
-- statement: The same 4-bit rounding costs a pruned model one and a half to two times as much perplexity.
-- published: 1.5 to 2 times
-- source: Efficient inference and compression (articles in Chinese), part 6
-- kind: measured
-- metric: rise of the log perplexity by rounding, pruned over unpruned, mean over pairs
-- direction: between
-- threshold: 1.5 2
-- experiment: prune_then_quantize
WITH loss AS (
    SELECT experiment, base, variant, kinds, steps, but_quantize, quantize, bits, ln(value) AS nats, standard_error / value AS error, ln(base_value) AS base_nats, base_standard_error / base_value AS base_error
    FROM compared WHERE metric = 'perplexity' AND status = 'ok' AND value > 0 AND base_value > 0
), pair AS (
    SELECT
        b.experiment, b.base, b.variant, b.nats - p.nats AS pruned, difference_error(b.error, p.error) AS pruned_error,
        q.nats - q.base_nats AS whole, difference_error(q.error, q.base_error) AS whole_error
    FROM loss AS b
    JOIN loss AS p ON p.experiment = b.experiment AND p.steps = b.but_quantize
    JOIN loss AS q ON q.experiment = b.experiment AND q.kinds = 'quantize' AND q.quantize = b.quantize
    WHERE b.bits = 4 AND b.kinds IN ('prune_depth quantize', 'prune_width quantize', 'prune_weights quantize')
)
SELECT
    experiment, base, avg(pruned / whole) AS value, mean_error(ratio_error(pruned, pruned_error, whole, whole_error)) AS error, count(*) AS n,
    string_agg(format('{} {:.2f}', variant, pruned / whole), ', ' ORDER BY variant) AS detail
FROM pair WHERE whole > 0 GROUP BY experiment, base;
