-- Which published statements do the facts of an experiment decide, and which way?
SELECT id, verdict, value, low, high, direction, threshold, statement
FROM claims
WHERE experiment = 'quickstart' AND verdict IN ('supported', 'refuted')
ORDER BY id;
