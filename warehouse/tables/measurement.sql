-- One number about one artifact; append-only.
-- Grain: one row per artifact, protocol, metric, slice and seed; a divergence also per base, a timing also per device and run.
CREATE TABLE measurement (
    artifact_digest VARCHAR NOT NULL,
    base_digest VARCHAR NOT NULL,
    protocol_digest VARCHAR NOT NULL,
    suite VARCHAR NOT NULL,
    metric VARCHAR NOT NULL,
    slice_kind VARCHAR NOT NULL DEFAULT 'all',
    slice VARCHAR NOT NULL DEFAULT 'all',
    value DOUBLE,
    unit VARCHAR NOT NULL,
    n BIGINT NOT NULL,
    standard_error DOUBLE,
    status VARCHAR NOT NULL DEFAULT 'ok',
    message VARCHAR,
    seed BIGINT NOT NULL DEFAULT 0,
    run VARCHAR NOT NULL,
    device_digest VARCHAR,
    threads BIGINT,
    path VARCHAR,
    other_cpu_share DOUBLE,
    measured_at TIMESTAMP WITH TIME ZONE NOT NULL,
    CHECK (value IS NULL OR isfinite(value)),
    CHECK ((value IS NULL) = (status IN ('failed', 'not_finite')))
);
-- The key has columns that may be NULL, so it is an index and not a primary key.
CREATE UNIQUE INDEX measurement_key ON measurement (
    artifact_digest, protocol_digest, metric, slice_kind, slice, seed, coalesce(device_digest, ''),
    (CASE WHEN suite = 'divergence' THEN base_digest ELSE '' END), (CASE WHEN device_digest IS NULL THEN '' ELSE run END)
);
COMMENT ON TABLE measurement IS 'One number about one artifact; append-only. Grain: one row per artifact, protocol, metric, slice and seed; a divergence also per base, a timing also per device and run.';
COMMENT ON COLUMN measurement.artifact_digest IS 'what was measured: a variant''s target_digest for divergence, its artifact_digest for the other suites';
COMMENT ON COLUMN measurement.base_digest IS 'what a divergence compares with; the base''s own digest elsewhere';
COMMENT ON COLUMN measurement.protocol_digest IS 'how it was measured';
COMMENT ON COLUMN measurement.suite IS 'divergence, bytes, acceptance, speed, speculation, constrained, distribution, arithmetic, layers, outliers, heads, zeros, recovery, choice, lm_eval, generation or needle';
COMMENT ON COLUMN measurement.metric IS 'name of the number, its unit at the end: kl_mean_nats, decode_tok_s';
COMMENT ON COLUMN measurement.slice_kind IS 'what the samples are split by: all (not split), token_class, language, position, temperature, temperature_k, filter_temperature, filter_temperature_k, batch, layer, head, tokens, domain, domain_tokens, task, task_metric, task_k, needle';
COMMENT ON COLUMN measurement.slice IS 'the part: digit, zh, 3, 0.7, 0.7/50, top_p 0.9/0.7, top_p 0.9/0.7/50, model.layers.0.mlp.up_proj, piqa, hops/1024/50; all where they are not split';
COMMENT ON COLUMN measurement.value IS 'the number, in unit; NULL when there is none, and status says why';
COMMENT ON COLUMN measurement.unit IS 'unit of value and standard_error';
COMMENT ON COLUMN measurement.n IS 'samples behind the value: tokens, prompts, repeats';
COMMENT ON COLUMN measurement.standard_error IS 'of value, in unit; NULL where none is stated';
COMMENT ON COLUMN measurement.status IS 'ok; noisy (a timing while others used the CPU: shown, not ranked); failed; not_finite';
COMMENT ON COLUMN measurement.message IS 'why there is no value; of a largest or lowest value, where it stands';
COMMENT ON COLUMN measurement.seed IS 'seed of the measurement';
COMMENT ON COLUMN measurement.run IS 'the run that measured it';
COMMENT ON COLUMN measurement.device_digest IS 'where a timing was taken; NULL for what does not depend on the machine';
COMMENT ON COLUMN measurement.threads IS 'CPU threads of a timing';
COMMENT ON COLUMN measurement.path IS 'how the weights were run: dense, dequantized, a packed kernel';
COMMENT ON COLUMN measurement.other_cpu_share IS 'share of the CPU that others took while a timing ran, 0 to 1';
COMMENT ON COLUMN measurement.measured_at IS 'when, UTC';
