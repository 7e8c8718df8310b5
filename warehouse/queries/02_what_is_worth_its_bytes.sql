-- Which variants does no sibling beat on both size and divergence?
SELECT variant, size_bytes, kl_mean_nats, kl_mean_standard_error_nats
FROM pareto
WHERE experiment = 'quickstart'
ORDER BY size_bytes, kl_mean_nats, variant;
