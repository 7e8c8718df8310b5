-- How much more does each int4 variant diverge than the base on the very same windows, and could the difference be chance?
SELECT variant, other, n, difference, low, high
FROM paired
WHERE experiment = 'quickstart' AND metric = 'kl_mean_nats' AND variant LIKE '%int4__none' AND other = 'none__none__none'
ORDER BY difference;
