-- Which combinations lose more than the sum of their parts, by more than two standard errors?
SELECT variant, parts, kl_mean_nats, kl_sum_of_parts_nats, kl_excess_nats, kl_excess_standard_error_nats
FROM interaction
WHERE experiment = 'quickstart' AND kl_excess_nats > 2 * kl_excess_standard_error_nats
ORDER BY kl_excess_nats DESC, variant;
