-- id: p07
-- statement: Half of the weights can go for free, each where it matters least; more cannot.
-- published: free up to about 50 %; +0.5 of 3.3 perplexity (Llama-2-70B)
-- source: Efficient inference and compression (articles in Chinese), part 6; Frantar and Alistarh 2023, arXiv:2301.00774
-- kind: measured
-- metric: relative rise of perplexity at 50 %, the best method
-- direction: at_most
-- threshold: 0.15
-- experiment: sparsity
-- note: Free is what the published +0.5 of 3.3 comes to.
WITH zeroed AS (
    SELECT
        experiment, base, variant, sparsity_pct, value, value / base_value - 1 AS rise, n,
        ratio_error(value, standard_error, base_value, base_standard_error) AS error
    FROM compared
    WHERE metric = 'perplexity' AND status = 'ok' AND kinds = 'prune_weights' AND sparsity_pct IS NOT NULL AND pattern IS NULL AND base_value > 0
)
SELECT
    experiment, base, min(rise) FILTER (sparsity_pct = 50) AS value, arg_min(error, rise) FILTER (sparsity_pct = 50) AS error, max(n) AS n,
    format('{}; at 30 % {:+.3g}, at 70 % {:+.3g}', arg_min(variant, rise) FILTER (sparsity_pct = 50), min(rise) FILTER (sparsity_pct = 30), min(rise) FILTER (sparsity_pct = 70)) AS detail
FROM zeroed GROUP BY experiment, base;
