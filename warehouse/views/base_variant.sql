-- Which variant is the base, unchanged, that the others of an experiment are compared with?
-- Grain: one row per experiment: the variant without steps; of several, the one called `base`, then the first by name.
CREATE OR REPLACE VIEW base_variant AS
SELECT experiment, variant, base, artifact_digest, target_digest, checkpoint_digest FROM current_variant
WHERE CASE WHEN json_valid(spec_json) THEN json_type(spec_json) = 'ARRAY' AND json_array_length(spec_json) = 0 END
QUALIFY row_number() OVER (PARTITION BY experiment ORDER BY variant <> 'base', variant) = 1;
