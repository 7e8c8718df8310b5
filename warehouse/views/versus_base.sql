-- How does each metric of a variant stand beside that of the unchanged base of the same experiment, under the same protocol, device and engine?
-- Grain: one row per experiment, variant and metric. difference: variant − base, in `unit`. ratio: variant ÷ base; NULL where the base has 0.
-- What was measured of the base in another way (protocol, seed, device, threads, engine) is no base: base_value is NULL.
-- status, base_status: a difference of a noisy timing is shown, not to be ranked. above_noise: whether the difference exceeds noise_floor, the largest
-- of either artifact, else of any under this protocol; NULL: none was measured. difference_shown: the difference, and 0 where it is not above noise.
CREATE OR REPLACE VIEW versus_base AS
WITH floor AS (
    SELECT artifact_digest, protocol_digest, metric, device_digest, max(floor) AS floor FROM noise_floor WHERE of = 'fact' GROUP BY ALL
), beside AS (
    SELECT
        mine.*, theirs.value AS base_value, theirs.status AS base_status, coalesce(greatest(f.floor, g.floor), h.floor) AS noise_floor
    FROM headline AS mine
    JOIN base_variant AS b ON b.experiment = mine.experiment AND b.variant <> mine.variant
    LEFT JOIN headline AS theirs
        ON theirs.experiment = b.experiment AND theirs.variant = b.variant AND theirs.metric = mine.metric AND theirs.suite = mine.suite
        AND theirs.protocol_digest = mine.protocol_digest AND theirs.seed = mine.seed AND theirs.device_digest IS NOT DISTINCT FROM mine.device_digest
        AND coalesce(theirs.threads = mine.threads, true) AND coalesce(engine_of(theirs.path) = engine_of(mine.path), true)
    LEFT JOIN floor AS f
        ON f.artifact_digest = mine.artifact_digest AND f.protocol_digest = mine.protocol_digest AND f.metric = mine.metric
        AND f.device_digest IS NOT DISTINCT FROM mine.device_digest
    LEFT JOIN floor AS g
        ON g.artifact_digest = theirs.artifact_digest AND g.protocol_digest = mine.protocol_digest AND g.metric = mine.metric
        AND g.device_digest IS NOT DISTINCT FROM mine.device_digest
    LEFT JOIN (SELECT protocol_digest, metric, device_digest, max(floor) AS floor FROM floor GROUP BY ALL) AS h
        ON h.protocol_digest = mine.protocol_digest AND h.metric = mine.metric AND h.device_digest IS NOT DISTINCT FROM mine.device_digest
)
SELECT
    experiment, variant, suite, protocol, metric, unit, better, value, base_value, value - base_value AS difference, value / nullif(base_value, 0) AS ratio,
    status, base_status, noise_floor, abs(value - base_value) > noise_floor AS above_noise,
    CASE WHEN abs(value - base_value) <= noise_floor THEN 0 ELSE value - base_value END AS difference_shown
FROM beside;
