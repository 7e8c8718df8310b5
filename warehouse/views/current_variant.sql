-- What is each variant now? The last materialization of each that its experiment still declares; `variant` also keeps what was before.
-- Grain: one row per experiment and variant. recorded_at: UTC.
CREATE OR REPLACE VIEW current_variant AS
SELECT v.* FROM variant AS v
LEFT JOIN experiment AS e ON e.experiment = v.experiment
WHERE e.variants IS NULL OR list_contains(e.variants, v.variant)
QUALIFY row_number() OVER (PARTITION BY v.experiment, v.variant ORDER BY v.recorded_at DESC, v.artifact_digest) = 1;
