-- Which one number stands for a metric of a variant? That of the protocol and device in `scorecard_protocol`, at the smallest seed.
-- A metric is that of the suite which the view `metric` names; of a suite there is one protocol, one device and one number of threads for all variants.
-- Grain: one row per experiment, variant and metric. value, standard_error: in `unit`. better: lower or higher.
CREATE OR REPLACE VIEW headline AS
SELECT f.*, k.better
FROM fact AS f
JOIN scorecard_protocol AS c
    ON c.experiment = f.experiment AND c.suite = f.suite AND c.protocol_digest = f.protocol_digest
    AND c.device_digest IS NOT DISTINCT FROM f.device_digest
    AND coalesce(c.threads = f.threads, true)  -- a failure has no threads
LEFT JOIN metric AS k ON k.metric = f.metric
WHERE k.suite IS NULL OR k.suite = f.suite
QUALIFY row_number() OVER (PARTITION BY f.experiment, f.variant, f.metric ORDER BY f.seed, f.suite) = 1;
