-- A bound that an experiment declares for one variant; the view verdict says whether it holds.
-- Grain: one row per experiment, variant and bound; the last declaration of an experiment's bounds replaces all before.
CREATE TABLE budget (
    experiment VARCHAR NOT NULL,
    variant VARCHAR NOT NULL,
    metric VARCHAR NOT NULL,
    at_most DOUBLE,
    at_least DOUBLE,
    blocks BOOLEAN NOT NULL DEFAULT false,
    recorded_at TIMESTAMP WITH TIME ZONE NOT NULL
);
-- The key has columns that may be NULL, so it is an index and not a primary key.
CREATE UNIQUE INDEX budget_key ON budget (
    experiment, variant, metric, coalesce(at_most, 'infinity'::DOUBLE), coalesce(at_least, '-infinity'::DOUBLE), blocks
);
COMMENT ON TABLE budget IS 'A bound that an experiment declares for one variant; the view verdict says whether it holds. Grain: one row per experiment, variant and bound; the last declaration of an experiment''s bounds replaces all before.';
COMMENT ON COLUMN budget.experiment IS 'name of the experiment';
COMMENT ON COLUMN budget.variant IS 'as in variant';
COMMENT ON COLUMN budget.metric IS 'the bounded metric';
COMMENT ON COLUMN budget.at_most IS 'upper bound, in the metric''s unit; NULL for a lower one';
COMMENT ON COLUMN budget.at_least IS 'lower bound, in the metric''s unit; NULL for an upper one';
COMMENT ON COLUMN budget.blocks IS 'whether a breach fails the run';
COMMENT ON COLUMN budget.recorded_at IS 'when it was declared, UTC';
