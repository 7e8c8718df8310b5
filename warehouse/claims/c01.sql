-- id: c01
-- statement: A decode step takes the longer of two times, that of reading weights, keys and values and that of computing, and a token that over the tokens of a step.
-- published: model
-- source: Efficient inference and compression (articles in Chinese), all parts; Williams et al. 2009, doi:10.1145/1498765.1498785
-- kind: measured
-- metric: measured over predicted seconds of a decode step, geometric mean over variants
-- direction: at_least
-- threshold: 1
-- experiment: quickstart
-- note: A floor, which no step is to be below; how near it comes is the view roofline. Needs the constants of the device (assay device).
SELECT
    experiment, any_value(base) AS base, exp(avg(log_residual)) AS value, exp(avg(log_residual)) * stddev_samp(log_residual) / sqrt(count(*)) AS error, count(*) AS n,
    CASE WHEN bool_or('noisy' IN (status, constants_status)) THEN 'a timing was noisy' END AS reason,
    format('from {:.2f} to {:.2f}, on {}', exp(min(log_residual)), exp(max(log_residual)), any_value(device)) AS detail
FROM roofline WHERE metric = 'decode_tok_s' AND isfinite(log_residual)
GROUP BY experiment;
