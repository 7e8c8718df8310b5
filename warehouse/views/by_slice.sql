-- What is known of each variant, also split by token class, language or position?
-- A draft does not change the output distribution, so a variant has the divergences of its target; every other fact is of the whole variant.
-- Grain: one row per experiment, variant, protocol, metric, slice and seed; a timing also per device. value, standard_error: in `unit`.
CREATE OR REPLACE VIEW by_slice AS
SELECT
    v.experiment, v.variant, v.base, m.suite, coalesce(p.name, m.suite) AS protocol, m.metric, m.slice_kind, m.slice, m.seed,
    m.value, m.unit, m.n, m.standard_error, m.status, m.message, d.name AS device, m.threads, m.path, m.other_cpu_share,
    m.run, m.measured_at, m.artifact_digest, m.base_digest, m.protocol_digest, m.device_digest
FROM measured_variant AS v
JOIN latest AS m ON m.artifact_digest = v.digest AND (m.suite = 'divergence') = v.of_target
LEFT JOIN protocol AS p ON p.protocol_digest = m.protocol_digest
LEFT JOIN device AS d ON d.device_digest = m.device_digest
-- The same checkpoint may be compared with another base in another experiment.
WHERE (m.suite <> 'divergence' OR v.bases IS NULL OR list_contains(v.bases, m.base_digest))
    AND coalesce(list_contains(v.protocols, m.protocol_digest), true);
