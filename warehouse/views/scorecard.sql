-- What did each variant come to? Each suite under one protocol, and timings on one device, for all variants (see `scorecard_protocol`).
-- Grain: one row per experiment and variant; a variant that was not measured has NULLs.
-- kl_*: nats per token against the base. top1_agreement, acceptance_rate: 0 to 1. *_tok_s: tokens per second. timing_status: the worst of them.
CREATE OR REPLACE VIEW scorecard AS
WITH wide AS (
    SELECT
        experiment, variant,
        CAST(max(value) FILTER (metric = 'size_bytes') AS BIGINT) AS size_bytes,
        max(value) FILTER (metric = 'bits_per_weight') AS bits_per_weight,
        max(value) FILTER (metric = 'kv_bytes_per_token') AS kv_bytes_per_token,
        max(value) FILTER (metric = 'kl_mean_nats') AS kl_mean_nats,
        max(standard_error) FILTER (metric = 'kl_mean_nats') AS kl_mean_standard_error_nats,
        max(value) FILTER (metric = 'kl_p99_nats') AS kl_p99_nats,
        max(value) FILTER (metric = 'top1_agreement') AS top1_agreement,
        max(value) FILTER (metric = 'perplexity') AS perplexity,
        max(value) FILTER (metric = 'perplexity_delta') AS perplexity_delta,
        max(n) FILTER (metric = 'kl_mean_nats') AS n_tokens,
        arg_max(status, list_position(['ok', 'not_finite', 'failed'], status)) FILTER (metric IN ('kl_mean_nats', 'divergence')) AS divergence_status,
        max(value) FILTER (metric = 'prefill_tok_s') AS prefill_tok_s,
        max(value) FILTER (metric = 'decode_tok_s') AS decode_tok_s,
        max(value) FILTER (metric = 'decode_no_draft_tok_s') AS decode_no_draft_tok_s,
        max(value) FILTER (metric = 'acceptance_rate') AS acceptance_rate,
        max(value) FILTER (metric = 'tokens_per_round') AS tokens_per_round,
        arg_max(status, list_position(['ok', 'noisy', 'not_finite', 'failed'], status)) FILTER (
            metric IN ('prefill_tok_s', 'decode_tok_s', 'decode_no_draft_tok_s', 'speed')
        ) AS timing_status,
        max(device) FILTER (suite = 'speed') AS device,
        max(protocol) FILTER (suite = 'divergence') AS divergence_protocol,
        max(protocol) FILTER (suite = 'speed') AS speed_protocol,
        max(protocol) FILTER (suite = 'acceptance') AS acceptance_protocol
    FROM headline
    GROUP BY experiment, variant
)
SELECT v.experiment, v.variant, v.base, wide.* EXCLUDE (experiment, variant), v.artifact_digest, v.recorded_at
FROM current_variant AS v
LEFT JOIN wide ON wide.experiment = v.experiment AND wide.variant = v.variant;
