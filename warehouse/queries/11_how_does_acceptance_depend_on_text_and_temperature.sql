-- How does the acceptance of a draft depend on the text and the temperature, and is it the overlap of the two distributions?
SELECT
    experiment, variant, protocol, max(value) FILTER (metric = 'acceptance_when_reached') AS acceptance, max(value) FILTER (metric = 'expected_acceptance') AS overlap,
    max(abs(value) / nullif(standard_error, 0)) FILTER (metric = 'acceptance_minus_expected') AS apart_in_standard_errors,
    max(value) FILTER (metric = 'tokens_per_round') AS tokens_per_round, max(n) FILTER (metric = 'acceptance_when_reached') AS n_tested
FROM fact
WHERE suite = 'acceptance'
GROUP BY experiment, variant, protocol
ORDER BY experiment, protocol, acceptance DESC NULLS LAST, variant;
