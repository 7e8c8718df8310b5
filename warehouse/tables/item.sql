-- One item of a suite (a window of tokens, a prompt), so that comparisons can be paired.
-- Grain: one row per artifact, protocol, item, metric and run; of a divergence also per base. It is kept by who reads the files (facts.latest): a key over millions of items
-- would take longer to build, and more memory, than all the rest.
CREATE TABLE item (
    artifact_digest VARCHAR NOT NULL,
    protocol_digest VARCHAR NOT NULL,
    suite VARCHAR NOT NULL,
    item BIGINT NOT NULL,
    metric VARCHAR NOT NULL,
    value DOUBLE,
    run VARCHAR NOT NULL,
    base_digest VARCHAR,
    CHECK (value IS NULL OR isfinite(value))
);
COMMENT ON TABLE item IS 'One item of a suite (a window of tokens, a prompt), so that comparisons can be paired. Grain: one row per artifact, protocol, item, metric and run; of a divergence also per base.';
COMMENT ON COLUMN item.artifact_digest IS 'what was measured';
COMMENT ON COLUMN item.protocol_digest IS 'how it was measured';
COMMENT ON COLUMN item.suite IS 'divergence, bytes, acceptance, speed, speculation, constrained, distribution, arithmetic, layers, outliers, heads, zeros, recovery, choice, lm_eval, generation or needle';
COMMENT ON COLUMN item.item IS 'number of the item, from 0; the same item has the same number for every variant';
COMMENT ON COLUMN item.metric IS 'as in measurement, of this item alone';
COMMENT ON COLUMN item.value IS 'the number; NULL when there is none';
COMMENT ON COLUMN item.run IS 'the run that measured it';
COMMENT ON COLUMN item.base_digest IS 'what a divergence compares with; NULL elsewhere, and where it was recorded before this was kept';
