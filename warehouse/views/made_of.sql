-- What is each variant made of? Its steps as columns, so that variants that differ in one thing can be found; NULL where it has no such step.
-- Grain: one row per experiment and variant. kinds: of its steps in order, a space between; '' of the base; prune_weights+quantize of one step
-- that does both. steps: they themselves, as JSON with commas between; but_quantize, but_draft, but_distill: the same without that step;
-- quantize, distill: that step alone. bits: of a weight's code. base_layers: blocks of the base, where its experiment says its shape.
CREATE OR REPLACE VIEW made_of AS
WITH listed AS (
    SELECT
        experiment, variant, base,
        CASE WHEN json_valid(spec_json) THEN CASE WHEN json_type(spec_json) = 'ARRAY' THEN json_extract(spec_json, '$[*]') END END AS steps
    FROM current_variant
), step AS (
    SELECT experiment, variant, place, each, each ->> 'kind' AS kind,
        CASE WHEN each ->> 'kind' = 'quantize' THEN each
            WHEN each ->> 'kind' = 'prune_weights' AND json_type(each -> 'quantize') = 'OBJECT' THEN each -> 'quantize' END AS q
    FROM (SELECT experiment, variant, unnest(steps) AS each, generate_subscripts(steps, 1) AS place FROM listed) AS unnested
), wide AS (
    SELECT
        experiment, variant,
        string_agg(CASE WHEN kind = 'prune_weights' AND q IS NOT NULL THEN 'prune_weights+quantize' ELSE kind END, ' ' ORDER BY place) AS kinds,
        string_agg(CAST(each AS VARCHAR), ',' ORDER BY place) AS steps,
        string_agg(CAST(each AS VARCHAR), ',' ORDER BY place) FILTER (kind <> 'quantize') AS but_quantize,
        string_agg(CAST(each AS VARCHAR), ',' ORDER BY place) FILTER (kind <> 'draft') AS but_draft,
        string_agg(CAST(each AS VARCHAR), ',' ORDER BY place) FILTER (kind <> 'distill') AS but_distill,
        max(CAST(each AS VARCHAR)) FILTER (kind = 'distill') AS distill,
        max(CAST(q AS VARCHAR)) AS quantize,
        max(q ->> 'method') AS quantize_method,
        max(q ->> 'format') AS format,
        max(TRY_CAST(q ->> 'group_size' AS BIGINT)) AS group_size,
        max(q ->> 'symmetric') = 'true' AS is_symmetric,
        max(q ->> 'range') AS weight_range,
        max(q -> 'gptq' ->> 'act_order') AS act_order,
        max(q -> 'inputs' ->> 'format') AS inputs_format,
        max(each ->> 'method') FILTER (kind = 'rotate') AS rotate,
        max(each ->> 'method') FILTER (kind = 'smooth') AS smooth,
        max(each ->> 'salience') FILTER (kind = 'smooth') AS salience,
        max(TRY_CAST(each ->> 'layers' AS BIGINT)) FILTER (kind = 'prune_depth') AS layers_cut,
        max(each ->> 'score') FILTER (kind = 'prune_depth') AS depth_score,
        max(CAST(each -> 'listed' AS VARCHAR)) FILTER (kind = 'prune_depth' AND json_type(each -> 'listed') = 'ARRAY') AS layers_listed,
        max(each ->> 'method') FILTER (kind = 'prune_weights') AS sparsity_method,
        max(TRY_CAST(each ->> 'sparsity_pct' AS BIGINT)) FILTER (kind = 'prune_weights') AS sparsity_pct,
        max(each ->> 'pattern') FILTER (kind = 'prune_weights') AS pattern,
        max(each ->> 'heads_by') FILTER (kind = 'prune_width' AND (each ->> 'heads_per_group') IS NOT NULL) AS heads_by,
        max(each ->> 'cut') FILTER (kind = 'prune_width') AS heads_cut,
        max(each ->> 'method') FILTER (kind = 'prune_experts') AS experts_method,
        max(each ->> 'loss') FILTER (kind = 'distill') AS distill_loss,
        max(TRY_CAST(each ->> 'tokens' AS BIGINT)) FILTER (kind = 'distill') AS distill_tokens,
        max(TRY_CAST(each ->> 'layers' AS BIGINT)) FILTER (kind = 'pretrain') AS pretrain_layers,
        max(each ->> 'tied') FILTER (kind = 'pretrain') = 'true' AS pretrain_tied,
        max(TRY_CAST(each ->> 'tokens' AS BIGINT)) FILTER (kind = 'pretrain') AS pretrain_tokens,
        max(each ->> 'format') FILTER (kind = 'kv') AS kv_format,
        max(each ->> 'method') FILTER (kind = 'draft') AS draft_method,
        max(TRY_CAST(each ->> 'tokens' AS BIGINT)) FILTER (kind = 'draft') AS draft_tokens
    FROM step
    GROUP BY experiment, variant
)
SELECT
    l.experiment, l.variant, l.base, CASE WHEN len(l.steps) = 0 THEN '' ELSE w.kinds END AS kinds, coalesce(w.steps, '') AS steps, coalesce(w.but_quantize, '') AS but_quantize,
    coalesce(w.but_draft, '') AS but_draft, coalesce(w.but_distill, '') AS but_distill,
    CASE WHEN json_valid(e.spec_json) THEN TRY_CAST(json_extract_string(e.spec_json, '$.base.shape.layers') AS BIGINT) END AS base_layers,
    CASE
        WHEN w.format IN ('int4', 'nf4', 'mxfp4', 'nvfp4') THEN 4
        WHEN w.format IN ('int8', 'fp8_e4m3', 'mxfp8') THEN 8
        WHEN w.format = 'int3' THEN 3
        WHEN w.format = 'int2' THEN 2
    END AS bits,
    w.* EXCLUDE (experiment, variant, kinds, steps, but_quantize, but_draft, but_distill)
FROM listed AS l
LEFT JOIN wide AS w ON w.experiment = l.experiment AND w.variant = l.variant
LEFT JOIN experiment AS e ON e.experiment = l.experiment;
