-- A way of measuring, whole.
-- Grain: one row per protocol.
CREATE TABLE protocol (
    protocol_digest VARCHAR NOT NULL,
    name VARCHAR NOT NULL,
    suite VARCHAR NOT NULL,
    spec_json VARCHAR NOT NULL,
    PRIMARY KEY (protocol_digest)
);
COMMENT ON TABLE protocol IS 'A way of measuring, whole. Grain: one row per protocol.';
COMMENT ON COLUMN protocol.protocol_digest IS 'sha256 of spec_json';
COMMENT ON COLUMN protocol.name IS 'the name that an experiment uses';
COMMENT ON COLUMN protocol.suite IS 'divergence, bytes, acceptance, speed, speculation, constrained, distribution, arithmetic, layers, outliers, heads, zeros, recovery, choice, lm_eval, generation or needle';
COMMENT ON COLUMN protocol.spec_json IS 'the protocol as JSON: text, token counts, window, dtype, seed';
