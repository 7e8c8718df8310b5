-- What changed since the last good run? The latest fact of each variant and metric beside the one before it that has status ok.
-- Grain: one row per experiment, variant, protocol, metric, seed and device that has such a predecessor. value, previous_value, bound: in `unit`.
-- flag: worse or better, beyond the bound; changed: another artifact, within the bound, or no bound is known; same; noisy; lost: no number now.
-- bound: a timing 5 % or 3 standard errors of the difference, whichever is more; bytes 0; the rest 2 standard errors of the difference.
CREATE OR REPLACE VIEW regression AS
WITH version AS (  -- every digest that a variant has had, as what divergences and as what other facts are about
    SELECT experiment, variant, artifact_digest AS digest, false AS of_target, recorded_at FROM variant
    UNION ALL
    SELECT experiment, variant, target_digest AS digest, true AS of_target, max(recorded_at) AS recorded_at
    FROM variant GROUP BY experiment, variant, target_digest
), base AS (
    SELECT DISTINCT v.experiment, unnest([v.artifact_digest, v.target_digest, v.checkpoint_digest]) AS digest
    FROM variant AS v JOIN base_variant AS b ON b.experiment = v.experiment AND b.variant = v.variant
), history AS (
    SELECT
        v.experiment, v.variant, m.*,
        v.recorded_at = max(v.recorded_at) OVER (PARTITION BY v.experiment, v.variant, v.of_target) AS is_current,
        row_number() OVER (
            PARTITION BY v.experiment, v.variant, m.protocol_digest, m.metric, m.seed, m.device_digest
            ORDER BY v.recorded_at DESC, m.measured_at DESC, m.run DESC
        ) AS age
    FROM version AS v
    JOIN attempt AS m ON m.artifact_digest = v.digest AND (m.suite = 'divergence') = v.of_target
    LEFT JOIN experiment AS e ON e.experiment = v.experiment
    WHERE coalesce(list_contains(e.protocols, m.protocol_digest), true) AND m.slice_kind = 'all' AND (
        m.suite <> 'divergence' OR v.experiment NOT IN (SELECT experiment FROM base) OR (v.experiment, m.base_digest) IN (FROM base)
    )
), pair AS (
    SELECT
        now.*, p.name AS protocol, d.name AS device, k.better, before.value AS previous_value, before.run AS previous_run,
        before.measured_at AS previous_measured_at, now.artifact_digest <> before.artifact_digest AS digest_changed,
        sqrt(now.standard_error ** 2 + before.standard_error ** 2) AS difference_error
    FROM history AS now
    JOIN history AS before
        ON before.experiment = now.experiment AND before.variant = now.variant AND before.protocol_digest = now.protocol_digest
        AND before.metric = now.metric AND before.seed = now.seed AND before.device_digest IS NOT DISTINCT FROM now.device_digest
        AND coalesce(before.threads = now.threads, true)  -- a failure has no threads
        AND before.age > now.age AND before.status = 'ok' AND (before.run, before.artifact_digest) <> (now.run, now.artifact_digest)
    LEFT JOIN protocol AS p ON p.protocol_digest = now.protocol_digest
    LEFT JOIN device AS d ON d.device_digest = now.device_digest
    LEFT JOIN metric AS k ON k.metric = now.metric
    WHERE now.age = 1 AND now.is_current AND (now.experiment, now.variant) IN (SELECT (experiment, variant) FROM current_variant)
    QUALIFY row_number() OVER (
        PARTITION BY now.experiment, now.variant, now.protocol_digest, now.metric, now.seed, now.device_digest ORDER BY before.age
    ) = 1
), bounded AS (
    SELECT *, CASE
        WHEN device_digest IS NOT NULL THEN greatest(0.05 * abs(previous_value), 3 * coalesce(difference_error, 0))
        WHEN suite = 'bytes' THEN 0
        ELSE 2 * difference_error
    END AS bound
    FROM pair
)
SELECT
    experiment, variant, metric, CASE
        WHEN status IN ('failed', 'not_finite') THEN 'lost'
        WHEN status = 'noisy' THEN 'noisy'
        WHEN value = previous_value AND NOT digest_changed THEN 'same'
        WHEN bound IS NULL OR better IS NULL THEN 'changed'
        WHEN abs(value - previous_value) <= bound THEN CASE WHEN digest_changed THEN 'changed' ELSE 'same' END
        WHEN (better = 'lower') = (value < previous_value) THEN 'better'
        ELSE 'worse'
    END AS flag, value, previous_value, value - previous_value AS difference, bound, unit, device, suite, coalesce(protocol, suite) AS protocol,
    seed, digest_changed, status, message, run, previous_run, measured_at, previous_measured_at
FROM bounded;
