-- An execution that wrote facts.
-- Grain: one row per run.
CREATE TABLE run (
    run VARCHAR NOT NULL,
    started_at TIMESTAMP WITH TIME ZONE NOT NULL,
    experiment VARCHAR,
    trigger VARCHAR NOT NULL,
    PRIMARY KEY (run)
);
COMMENT ON TABLE run IS 'An execution that wrote facts. Grain: one row per run.';
COMMENT ON COLUMN run.run IS 'id of the run';
COMMENT ON COLUMN run.started_at IS 'when it began, UTC';
COMMENT ON COLUMN run.experiment IS 'the experiment that it was for; NULL for several';
COMMENT ON COLUMN run.trigger IS 'who began it: cli, ui, schedule or test';
