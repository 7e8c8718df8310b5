-- What was found on each single item (window of text, problem, prompt) of each variant?
-- Grain: one row per experiment, variant, protocol, metric and item; items without a number are left out. engine: what ran the model.
CREATE OR REPLACE VIEW variant_item AS
SELECT v.experiment, v.variant, r.artifact_digest, r.protocol_digest, r.suite, r.engine, r.device_digest, i.metric, i.item, i.value
FROM measured_variant AS v
JOIN item_run AS r ON r.artifact_digest = v.digest AND (r.suite = 'divergence') = v.of_target
JOIN item AS i ON i.artifact_digest = r.artifact_digest AND i.protocol_digest = r.protocol_digest AND i.run = r.run
    AND coalesce(i.base_digest = r.base_digest, true)
WHERE i.value IS NOT NULL AND (r.base_digest IS NULL OR v.bases IS NULL OR list_contains(v.bases, r.base_digest))
    AND coalesce(list_contains(v.protocols, r.protocol_digest), true);
