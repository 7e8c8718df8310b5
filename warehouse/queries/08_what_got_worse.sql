-- What is worse than in the last good run, beyond its noise?
SELECT experiment, variant, metric, previous_value, value, difference, bound, unit, device, previous_run, run
FROM regression
WHERE flag IN ('worse', 'lost')
ORDER BY experiment, variant, metric;
