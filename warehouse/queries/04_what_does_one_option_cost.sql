-- What does int4 cost and bring, beside the same variant without it?
SELECT
    prune, draft, with_it.kl_mean_nats - without.kl_mean_nats AS kl_added_nats, with_it.size_bytes / without.size_bytes AS size_ratio,
    with_it.decode_tok_s / without.decode_tok_s AS decode_ratio
FROM quickstart AS with_it
JOIN quickstart AS without USING (prune, draft)
WHERE with_it.quantize = 'int4' AND without.quantize = 'none'
ORDER BY prune, draft;
