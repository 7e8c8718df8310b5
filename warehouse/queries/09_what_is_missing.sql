-- Which budgets are breached or cannot be judged, and which numbers are missing or not to be trusted?
SELECT experiment, variant, metric, verdict AS problem, value, coalesce(at_most, at_least) AS bound, CAST(NULL AS VARCHAR) AS message
FROM verdict
WHERE verdict <> 'holds'
UNION ALL
SELECT experiment, variant, metric, status, value, NULL, message
FROM fact
WHERE status <> 'ok'
ORDER BY experiment, problem, variant, metric;
