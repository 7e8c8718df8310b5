-- A variant of an experiment and what it came to.
-- Grain: one row per experiment, variant and digest it has had; the view current_variant has the last of them.
CREATE TABLE variant (
    experiment VARCHAR NOT NULL,
    variant VARCHAR NOT NULL,
    base VARCHAR NOT NULL,
    artifact_digest VARCHAR NOT NULL,
    target_digest VARCHAR NOT NULL,
    checkpoint_digest VARCHAR NOT NULL,
    spec_json VARCHAR NOT NULL,
    recorded_at TIMESTAMP WITH TIME ZONE NOT NULL,
    PRIMARY KEY (experiment, variant, artifact_digest)
);
COMMENT ON TABLE variant IS 'A variant of an experiment and what it came to. Grain: one row per experiment, variant and digest it has had; the view current_variant has the last of them.';
COMMENT ON COLUMN variant.experiment IS 'name of the experiment';
COMMENT ON COLUMN variant.variant IS 'option names in axis order, joined by two underscores; base where the base is no grid point';
COMMENT ON COLUMN variant.base IS 'name of the base model';
COMMENT ON COLUMN variant.artifact_digest IS 'sha256 of the whole variant, runtime steps included; bytes, acceptance and speed are facts about it';
COMMENT ON COLUMN variant.target_digest IS 'sha256 of the variant without its draft: what defines the output distribution; divergences are facts about it';
COMMENT ON COLUMN variant.checkpoint_digest IS 'sha256 of the weights alone';
COMMENT ON COLUMN variant.spec_json IS 'the list of its steps as JSON; empty for the base';
COMMENT ON COLUMN variant.recorded_at IS 'when it was last materialized, UTC';
