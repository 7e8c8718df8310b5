-- Which run's items count, where several runs measured the same ones? That of the facts, so that both are of one moment; a suite that failed since has none.
-- Grain: one row per artifact and protocol; a divergence also per base. engine: what ran the model, without what its weights were.
CREATE OR REPLACE VIEW item_run AS
SELECT
    artifact_digest, protocol_digest, any_value(suite) AS suite, CASE WHEN suite = 'divergence' THEN base_digest END AS base_digest,
    arg_max(run, (measured_at, run)) AS run, max(engine_of(path)) AS engine, any_value(device_digest) AS device_digest
FROM latest
WHERE status IN ('ok', 'noisy')
GROUP BY artifact_digest, protocol_digest, CASE WHEN suite = 'divergence' THEN base_digest END;
