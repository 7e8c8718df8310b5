-- A step as it was built.
-- Grain: one row per artifact.
CREATE TABLE step (
    artifact_digest VARCHAR NOT NULL,
    key VARCHAR NOT NULL,
    kind VARCHAR NOT NULL,
    spec_json VARCHAR NOT NULL,
    code_fingerprint VARCHAR NOT NULL,
    size_bytes BIGINT NOT NULL,
    build_seconds DOUBLE NOT NULL,
    built_at TIMESTAMP WITH TIME ZONE NOT NULL,
    summary_json VARCHAR,
    PRIMARY KEY (artifact_digest)
);
COMMENT ON TABLE step IS 'A step as it was built. Grain: one row per artifact.';
COMMENT ON COLUMN step.artifact_digest IS 'sha256 of the artifact that the step made';
COMMENT ON COLUMN step.key IS 'sha256 of the action: step, code, parents, data, seed, versions';
COMMENT ON COLUMN step.kind IS 'kind of the step: prune_depth, quantize, kv, draft, …';
COMMENT ON COLUMN step.spec_json IS 'the step as JSON';
COMMENT ON COLUMN step.code_fingerprint IS 'sha256 of the code that the step runs, comments left out';
COMMENT ON COLUMN step.size_bytes IS 'bytes of the artifact''s files';
COMMENT ON COLUMN step.build_seconds IS 'seconds that building it took, waiting left out';
COMMENT ON COLUMN step.built_at IS 'when it was built, UTC';
COMMENT ON COLUMN step.summary_json IS 'what the step says of what it found, as JSON: removed layers, exponents of scales; NULL where it was recorded before this was kept';
