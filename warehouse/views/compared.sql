-- How does each metric of a variant stand beside the base's, and what is the variant made of? As `versus_base`, with errors and the columns of `made_of`.
-- Grain: one row per experiment, variant and metric, of the base too, under the one protocol that `headline` shows. value, standard_error: in `unit`.
CREATE OR REPLACE VIEW compared AS
WITH shown AS MATERIALIZED (
    SELECT experiment, variant, suite, protocol, protocol_digest, device, metric, value, standard_error, unit, n, status FROM headline
)
SELECT
    h.* EXCLUDE (variant), b.value AS base_value, b.standard_error AS base_standard_error, b.status AS base_status, m.* EXCLUDE (experiment)
FROM shown AS h
JOIN made_of AS m ON m.experiment = h.experiment AND m.variant = h.variant
LEFT JOIN base_variant AS v ON v.experiment = h.experiment
LEFT JOIN shown AS b ON b.experiment = h.experiment AND b.variant = v.variant AND b.metric = h.metric AND b.protocol_digest = h.protocol_digest;
