-- How much faster does a draft make decoding, and how many of its proposals are accepted?
SELECT variant, acceptance_rate, tokens_per_round, decode_no_draft_tok_s, decode_tok_s, decode_tok_s / decode_no_draft_tok_s AS speedup
FROM scorecard
WHERE experiment = 'quickstart' AND acceptance_rate IS NOT NULL
ORDER BY speedup DESC, variant;
