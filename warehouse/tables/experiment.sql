-- An experiment as it was last declared.
-- Grain: one row per experiment.
CREATE TABLE experiment (
    experiment VARCHAR NOT NULL,
    question VARCHAR NOT NULL,
    axes VARCHAR[] NOT NULL,
    variants VARCHAR[] NOT NULL,
    spec_json VARCHAR NOT NULL,
    declared_at TIMESTAMP WITH TIME ZONE NOT NULL,
    protocols VARCHAR[],
    PRIMARY KEY (experiment)
);
COMMENT ON TABLE experiment IS 'An experiment as it was last declared. Grain: one row per experiment.';
COMMENT ON COLUMN experiment.experiment IS 'name of the experiment, and of its own view';
COMMENT ON COLUMN experiment.question IS 'what it is to answer';
COMMENT ON COLUMN experiment.axes IS 'axis names in declared order';
COMMENT ON COLUMN experiment.variants IS 'variant names in declared order; a variant that is not among them is history and in no view';
COMMENT ON COLUMN experiment.spec_json IS 'its question, base and options as JSON';
COMMENT ON COLUMN experiment.declared_at IS 'when it was declared, UTC';
COMMENT ON COLUMN experiment.protocols IS 'digests of its protocols; facts under any other are history, or those of another experiment, and in no view of this one; NULL: not told, and all are shown';
