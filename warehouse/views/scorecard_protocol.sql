-- Under which protocol, and on which device, does the scorecard of an experiment show a suite?
-- One for all its variants, so that they compare: what measured the most of them; of equals the first protocol by name, then the latest.
-- Grain: one row per experiment and suite. variants: how many it measured. device, threads: NULL for what does not depend on the machine.
CREATE OR REPLACE VIEW scorecard_protocol AS
WITH used AS (
    SELECT
        experiment, suite, any_value(protocol) AS protocol, any_value(device) AS device, threads,
        count(DISTINCT variant) FILTER (status IN ('ok', 'noisy')) AS variants, max(measured_at) AS measured_at, protocol_digest, device_digest
    FROM fact
    GROUP BY experiment, suite, protocol_digest, device_digest, threads
)
SELECT * FROM used
QUALIFY row_number() OVER (
    PARTITION BY experiment, suite ORDER BY variants DESC, protocol, measured_at DESC, protocol_digest, device_digest, threads
) = 1;
