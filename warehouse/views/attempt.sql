-- What was found, or tried in vain? Every measurement; a suite that failed as a whole is one row, whose metric is the suite's name, and is
-- spelled out here: every metric that its protocol gave elsewhere has failed too. A failure that was made good since is left out.
-- Grain: one row per artifact, protocol, metric, slice, seed and, for what failed or was timed, run; a divergence also per base.
CREATE OR REPLACE VIEW attempt AS
WITH failure AS (
    SELECT * FROM measurement AS f
    WHERE f.status = 'failed' AND f.metric = f.suite AND NOT EXISTS (
        FROM measurement AS m
        WHERE m.artifact_digest = f.artifact_digest AND m.protocol_digest = f.protocol_digest AND m.base_digest = f.base_digest
        AND m.device_digest IS NOT DISTINCT FROM f.device_digest AND m.metric <> m.suite AND m.measured_at >= f.measured_at
    )
), given AS (
    SELECT protocol_digest, metric, slice_kind, slice, any_value(unit) AS unit FROM measurement
    WHERE metric <> suite AND slice_kind = 'all' GROUP BY ALL
)
SELECT * FROM measurement WHERE metric <> suite
UNION ALL BY NAME
SELECT * FROM failure
UNION ALL BY NAME
SELECT f.* REPLACE (g.metric AS metric, g.unit AS unit) FROM failure AS f JOIN given AS g ON g.protocol_digest = f.protocol_digest;
