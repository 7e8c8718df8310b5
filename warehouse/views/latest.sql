-- What is the last word on each fact, whichever run it came from? Its status is kept: a failure is an answer too.
-- Grain: one row per artifact, protocol, metric, slice and seed; a divergence also per base, a timing also per device.
CREATE OR REPLACE VIEW latest AS
SELECT * FROM attempt
QUALIFY row_number() OVER (
    PARTITION BY
        artifact_digest, protocol_digest, metric, slice_kind, slice, seed, device_digest,
        CASE WHEN suite = 'divergence' THEN base_digest END
    ORDER BY measured_at DESC, run DESC
) = 1;
