-- How does each metric of a variant stand beside the base's, and what is the variant made of? As `versus_base`, with errors and the columns of `made_of`.
-- Grain: one row per experiment, variant and metric, of the base too, under the one protocol that `headline` shows. value, standard_error: in `unit`.
-- base_value: NULL where the base was measured in another way (seed, device, threads, engine).
CREATE OR REPLACE VIEW compared AS
SELECT
    h.experiment, h.suite, h.protocol, h.protocol_digest, h.device, h.metric, h.value, h.standard_error, h.unit, h.n, h.status,
    b.value AS base_value, b.standard_error AS base_standard_error, b.status AS base_status, m.* EXCLUDE (experiment)
FROM headline AS h
JOIN made_of AS m ON m.experiment = h.experiment AND m.variant = h.variant
LEFT JOIN base_variant AS v ON v.experiment = h.experiment
LEFT JOIN headline AS b
    ON b.experiment = h.experiment AND b.variant = v.variant AND b.metric = h.metric AND b.suite = h.suite
    AND b.protocol_digest = h.protocol_digest AND b.seed = h.seed AND b.device_digest IS NOT DISTINCT FROM h.device_digest
    AND coalesce(b.threads = h.threads, true) AND coalesce(engine_of(b.path) = engine_of(h.path), true);
