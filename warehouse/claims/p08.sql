-- id: p08
-- statement: Zeros in no pattern save no time.
-- published: none
-- source: Efficient inference and compression (articles in Chinese), part 6
-- kind: measured
-- metric: decoding speed over the base's, mean over variants with zeros in no pattern
-- direction: at_most
-- threshold: 1.05
-- experiment: sparsity
-- note: Less than 5 % is no difference between timings here. 2:4 in compute-bound work needs a GPU.
SELECT
    experiment, base, avg(value / base_value) AS value, mean_error(ratio_error(value, standard_error, base_value, base_standard_error)) AS error, count(*) AS n,
    CASE WHEN bool_or('noisy' IN (status, base_status)) THEN 'a timing was noisy' END AS reason,
    format('from {:.2f} to {:.2f}, on {}', min(value / base_value), max(value / base_value), any_value(device)) AS detail
FROM compared
WHERE metric = 'decode_tok_s' AND kinds = 'prune_weights' AND sparsity_pct IS NOT NULL AND pattern IS NULL AND value > 0 AND base_value > 0
GROUP BY experiment, base;
