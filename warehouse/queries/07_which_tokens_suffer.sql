-- Which class of tokens loses most, relative to the mean over all tokens?
SELECT part.variant, part.slice AS token_class, part.value AS kl_mean_nats, part.value / nullif(whole.value, 0) AS times_the_mean, part.n AS n_tokens
FROM by_slice AS part
JOIN headline AS whole USING (experiment, variant, metric, protocol_digest, seed)
WHERE part.experiment = 'quickstart' AND metric = 'kl_mean_nats' AND part.slice_kind = 'token_class'
ORDER BY times_the_mean DESC NULLS LAST, part.variant, token_class;
