-- Which one number stands for a metric of a variant? That of the protocol and device in `scorecard_protocol`, at the smallest seed.
-- Grain: one row per experiment, variant and metric. value, standard_error: in `unit`. better: lower or higher.
CREATE OR REPLACE VIEW headline AS
SELECT f.*, k.better
FROM fact AS f
JOIN scorecard_protocol AS c
    ON c.experiment = f.experiment AND c.suite = f.suite AND c.protocol_digest = f.protocol_digest
    AND c.device_digest IS NOT DISTINCT FROM f.device_digest
LEFT JOIN metric AS k ON k.metric = f.metric
QUALIFY row_number() OVER (PARTITION BY f.experiment, f.variant, f.metric ORDER BY f.seed) = 1;
