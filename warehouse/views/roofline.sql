-- How far is each timing from what the device allows? Predicted: max((weight bytes + KV bytes) / bandwidth, FLOPs / rate, launch) of one forward, with
-- the device's own constants (see `device_constant`); with a draft, of a verification and the proposals before it.
-- Grain: one row per experiment, variant, speed protocol, timed metric, seed and device that has constants.
-- *_seconds: of one forward, or of one round with a draft: measured = batch · tokens_per_forward / value. tokens_per_forward: 1, or tokens_per_round.
-- weight_bytes: as stored where the engine reads them packed, in the dtype of the arithmetic where it multiplies them out; layouts wider than what is
-- stored, and experts that other texts of a batch are sent to, are not counted. kv_bytes: at the middle of what is decoded; of a prefill, what it writes.
-- limit_by: weights, kv, compute or launch. log_residual: ln(measured / predicted). share_of_limit: predicted / measured, 1 on the roof.
-- status: of the timing. constants_status: noisy where one of the constants is.
CREATE OR REPLACE VIEW roofline AS
WITH size AS (
    SELECT
        m.artifact_digest,
        arg_max(m.value, m.measured_at) FILTER (m.metric = 'step_weight_bytes') AS step_weight_bytes,
        arg_max(m.value, m.measured_at) FILTER (m.metric = 'block_parameters') AS block_parameters,
        arg_max(m.value, m.measured_at) FILTER (m.metric = 'head_parameters') AS head_parameters,
        arg_max(m.value, m.measured_at) FILTER (m.metric = 'attention_flops_per_context_token') AS attention_flops,
        arg_max(m.value, m.measured_at) FILTER (m.metric = 'kv_bytes_per_token') AS kv_bytes_per_token,
        arg_max(CASE p.spec_json ->> '$.kv_dtype' WHEN 'float32' THEN 4 ELSE 2 END, m.measured_at)
            FILTER (m.metric = 'kv_bytes_per_token') AS kv_number_bytes,
        coalesce(arg_max(m.value, m.measured_at) FILTER (m.metric = 'draft_step_weight_bytes'), 0) AS draft_weight_bytes,
        coalesce(arg_max(m.value, m.measured_at) FILTER (m.metric = 'draft_matmul_parameters'), 0) AS draft_parameters
    FROM latest AS m
    LEFT JOIN protocol AS p ON p.protocol_digest = m.protocol_digest
    WHERE m.suite = 'bytes' AND m.slice_kind = 'all'
    GROUP BY m.artifact_digest
), round AS (
    SELECT artifact_digest, arg_max(value, measured_at) AS tokens_per_round FROM latest
    WHERE suite = 'acceptance' AND metric = 'tokens_per_round' AND slice_kind = 'all' GROUP BY artifact_digest
), asked AS (
    SELECT
        f.experiment, f.variant, f.base, f.protocol, f.metric, f.seed, f.value, f.status, f.device, f.threads, f.path, f.run, f.measured_at,
        f.device_digest, f.metric = 'prefill_tok_s' AS prefills,
        f.metric = 'decode_tok_s' AND v.spec_json ->> '$[#-1].kind' = 'draft' AS drafts,
        coalesce(p.spec_json ->> '$.dtype', 'float32') AS dtype,
        CAST(p.spec_json ->> '$.batch' AS BIGINT) AS batch,
        CAST(p.spec_json ->> '$.prefill_tokens' AS BIGINT) AS prefill_tokens,
        CAST(p.spec_json ->> '$.prompt_tokens' AS BIGINT) + CAST(p.spec_json ->> '$.new_tokens' AS BIGINT) / 2 AS context,
        CAST(v.spec_json ->> '$[#-1].tokens' AS BIGINT) AS proposals,
        list_contains(json_extract_string(v.spec_json, '$[*].kind'), 'kv') AS kv_is_packed,
        s.*, r.tokens_per_round
    FROM fact AS f
    JOIN current_variant AS v ON v.experiment = f.experiment AND v.variant = f.variant
    JOIN protocol AS p ON p.protocol_digest = f.protocol_digest
    JOIN size AS s ON s.artifact_digest = f.artifact_digest
    LEFT JOIN round AS r ON r.artifact_digest = f.artifact_digest
    WHERE f.suite = 'speed' AND f.metric IN ('prefill_tok_s', 'decode_tok_s', 'decode_no_draft_tok_s') AND f.value > 0
), work AS (
    SELECT
        *, CASE dtype WHEN 'float32' THEN 4 ELSE 2 END AS number_bytes,
        CASE WHEN drafts THEN tokens_per_round ELSE 1 END AS tokens_per_forward,
        CASE WHEN path LIKE 'torch %' OR path LIKE '%without triton%' THEN (block_parameters + head_parameters) * number_bytes
        ELSE step_weight_bytes END AS weight_bytes,
        kv_bytes_per_token * CASE WHEN kv_is_packed THEN 1 ELSE number_bytes / kv_number_bytes END
            * batch * CASE WHEN prefills THEN prefill_tokens ELSE context END AS kv_bytes,
        CASE
            WHEN prefills THEN batch * (prefill_tokens * (2 * block_parameters + attention_flops * (prefill_tokens + 1) / 2) + 2 * head_parameters)
            ELSE batch * CASE WHEN drafts THEN proposals + 1 ELSE 1 END * (2 * (block_parameters + head_parameters) + attention_flops * context)
        END AS flops,
        CASE WHEN prefills THEN batch * prefill_tokens ELSE batch * tokens_per_forward END / value AS measured_seconds
    FROM asked
), constant AS (
    FROM device_constant WHERE source = 'measured'
), chosen AS (
    SELECT
        w.*, b.value AS bandwidth, r.value AS rate, coalesce(l.value, 0) AS launch_seconds,
        CASE WHEN b.status = 'ok' AND r.status = 'ok' AND coalesce(l.status, 'ok') = 'ok' THEN 'ok' ELSE 'noisy' END AS constants_status
    FROM work AS w
    -- Of as many threads where there are some, quiet ones first: the bandwidth of the nearest size, and the highest rate.
    JOIN LATERAL (
        FROM constant AS c WHERE c.device_digest = w.device_digest AND c.constant = 'read_bandwidth'
        ORDER BY c.threads IS NOT DISTINCT FROM w.threads DESC, c.status = 'ok' DESC, abs(ln(c.amount / w.weight_bytes)) LIMIT 1
    ) AS b ON true
    JOIN LATERAL (
        FROM constant AS c WHERE c.device_digest = w.device_digest AND c.constant = 'matmul_rate' AND c.dtype = w.dtype
        ORDER BY c.threads IS NOT DISTINCT FROM w.threads DESC, c.status = 'ok' DESC, c.value DESC LIMIT 1
    ) AS r ON true
    LEFT JOIN LATERAL (
        FROM constant AS c WHERE c.device_digest = w.device_digest AND c.constant = 'launch_overhead'
        ORDER BY c.threads IS NOT DISTINCT FROM w.threads DESC, c.status = 'ok' DESC LIMIT 1
    ) AS l ON true
), timed AS (
    SELECT
        *, (weight_bytes + kv_bytes) / bandwidth AS memory_seconds, flops / rate AS compute_seconds,
        CASE WHEN drafts THEN proposals * greatest(draft_weight_bytes / bandwidth, 2 * draft_parameters / rate) ELSE 0 END AS draft_seconds,
        greatest(memory_seconds, compute_seconds, launch_seconds) + draft_seconds AS predicted_seconds
    FROM chosen
)
SELECT
    experiment, variant, base, protocol, metric, seed, measured_seconds, predicted_seconds, CASE
        WHEN memory_seconds >= greatest(compute_seconds, launch_seconds) THEN CASE WHEN weight_bytes >= kv_bytes THEN 'weights' ELSE 'kv' END
        WHEN compute_seconds >= launch_seconds THEN 'compute' ELSE 'launch'
    END AS limit_by,
    ln(measured_seconds / predicted_seconds) AS log_residual, predicted_seconds / measured_seconds AS share_of_limit,
    memory_seconds, compute_seconds, draft_seconds, launch_seconds, weight_bytes, kv_bytes, flops, tokens_per_forward, batch,
    bandwidth AS bandwidth_bytes_s, rate AS rate_flop_s, value AS tok_s, status, constants_status, device, threads, path, run, measured_at
FROM timed;
