-- How much does a number move when nothing but chance does: the same artifact measured twice, with another seed, batch or dtype?
-- Protocols of one suite count as the same but for these three when the rest of their specs is equal; the batch of a timing is no noise, and stays.
-- Grain: one row per artifact, protocol, metric, device, `of` and `differs`. floor: the largest absolute difference, in the metric's unit. of: fact, or item:
-- of the mean over the items of a suite. differs: seed, batch, dtype, or several joined by +; itself: a base's divergence from itself, which is 0 but for
-- the engine; repeats: 2 standard errors of the difference of two timings of this spread. twins: protocols behind it.
CREATE OR REPLACE VIEW noise_floor AS
WITH spec AS (
    SELECT
        protocol_digest, suite, json_extract_string(spec_json, '$.seed') AS seed, json_extract_string(spec_json, '$.batch') AS batch,
        json_extract_string(spec_json, '$.dtype') AS dtype,
        json_merge_patch(spec_json, CASE WHEN suite IN ('speed', 'speculation') THEN '{"seed": null, "dtype": null}' ELSE '{"seed": null, "batch": null, "dtype": null}' END) AS rest
    FROM protocol WHERE CASE WHEN json_valid(spec_json) THEN json_type(spec_json) = 'OBJECT' END
), twin AS (
    SELECT
        a.protocol_digest, b.protocol_digest AS twin_digest,
        concat_ws('+', CASE WHEN a.seed IS DISTINCT FROM b.seed THEN 'seed' END, CASE WHEN a.batch IS DISTINCT FROM b.batch THEN 'batch' END,
            CASE WHEN a.dtype IS DISTINCT FROM b.dtype THEN 'dtype' END) AS differs
    FROM spec AS a JOIN spec AS b ON b.suite = a.suite AND b.rest = a.rest AND b.protocol_digest <> a.protocol_digest
    WHERE a.rest <> '{}' AND differs <> ''
), number AS (
    SELECT
        artifact_digest, protocol_digest, CASE WHEN suite = 'divergence' THEN base_digest END AS base_digest, suite, metric, device_digest, 'fact' AS of,
        value, standard_error
    FROM latest WHERE slice_kind = 'all' AND status = 'ok'
    UNION ALL
    SELECT i.artifact_digest, i.protocol_digest, r.base_digest, any_value(i.suite), i.metric, any_value(r.device_digest), 'item', avg(i.value), NULL
    FROM item_run AS r
    JOIN item AS i ON i.artifact_digest = r.artifact_digest AND i.protocol_digest = r.protocol_digest AND i.run = r.run AND coalesce(i.base_digest = r.base_digest, true)
    WHERE r.artifact_digest = r.base_digest OR r.protocol_digest IN (SELECT protocol_digest FROM twin)
    GROUP BY i.artifact_digest, i.protocol_digest, r.base_digest, i.metric
), found AS (
    SELECT a.artifact_digest, a.protocol_digest, a.suite, a.metric, a.device_digest, a.of, t.differs, abs(a.value - b.value) AS floor, t.twin_digest
    FROM number AS a
    JOIN twin AS t ON t.protocol_digest = a.protocol_digest
    JOIN number AS b
        ON b.protocol_digest = t.twin_digest AND b.artifact_digest = a.artifact_digest AND b.metric = a.metric AND b.of = a.of
        AND b.base_digest IS NOT DISTINCT FROM a.base_digest AND b.device_digest IS NOT DISTINCT FROM a.device_digest
    UNION ALL
    SELECT
        artifact_digest, protocol_digest, suite, metric, device_digest, of, 'itself', CASE WHEN metric = 'top1_agreement' THEN 1 - value ELSE abs(value) END,
        protocol_digest
    FROM number
    WHERE artifact_digest = base_digest AND (metric LIKE 'kl\_%' ESCAPE '\' OR metric IN ('tv_mean', 'top1_agreement', 'perplexity_delta'))
    UNION ALL
    SELECT artifact_digest, protocol_digest, suite, metric, device_digest, of, 'repeats', 2 * sqrt(2) * standard_error, protocol_digest
    FROM number WHERE device_digest IS NOT NULL AND standard_error IS NOT NULL
)
SELECT
    artifact_digest, suite, protocol_digest, metric, device_digest, of, differs, max(floor) AS floor,
    CAST(count(DISTINCT twin_digest) AS INTEGER) AS twins
FROM found
WHERE floor IS NOT NULL
GROUP BY ALL;
