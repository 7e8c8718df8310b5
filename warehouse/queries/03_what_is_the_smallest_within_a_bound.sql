-- What is the smallest variant that loses less than 0.1 nats a token, two standard errors included?
SELECT variant, size_bytes, kl_mean_nats
FROM quickstart
WHERE divergence_status = 'ok' AND kl_mean_nats + 2 * coalesce(kl_mean_standard_error_nats, 0) < 0.1
ORDER BY size_bytes, kl_mean_nats, variant
LIMIT 1;
