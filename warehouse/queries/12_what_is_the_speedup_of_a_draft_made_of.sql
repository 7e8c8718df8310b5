-- What is the speed-up of a draft made of, does the formula predict it, and at which batch does it end?
SELECT
    experiment, variant, protocol, max(value) FILTER (metric = 'measured_speedup') AS measured,
    max(value) FILTER (metric = 'predicted_speedup_with_verification') AS predicted_with_verification,
    max(value) FILTER (metric = 'predicted_speedup') AS predicted, max(value) FILTER (metric = 'draft_cost_ratio') AS draft_cost,
    max(value) FILTER (metric = 'verify_cost_ratio') AS verify_cost, max(value) FILTER (metric = 'best_gamma') AS best_gamma,
    max(value) FILTER (metric = 'break_even_batch') AS break_even_batch, any_value(status) FILTER (metric = 'measured_speedup') AS status
FROM fact
WHERE suite = 'speculation'
GROUP BY experiment, variant, protocol
ORDER BY experiment, protocol, measured DESC NULLS LAST, variant;
