-- Which run's items count, where several runs measured the same ones? That of the facts, so that both are of one moment; a suite that failed since has none.
-- Grain: one row per artifact and protocol; a divergence also per base. engine, device_digest: what ran the model in that run, without what its weights were.
CREATE OR REPLACE VIEW item_run AS
SELECT
    artifact_digest, protocol_digest, last.suite, base_digest, last.run, engine_of(last.path) AS engine, last.device_digest
FROM (
    SELECT
        artifact_digest, protocol_digest, CASE WHEN suite = 'divergence' THEN base_digest END AS base_digest,
        arg_max(struct_pack(suite, run, path, device_digest), (measured_at, run, path)) AS last
    FROM latest
    WHERE status IN ('ok', 'noisy')
    GROUP BY artifact_digest, protocol_digest, CASE WHEN suite = 'divergence' THEN base_digest END
);
