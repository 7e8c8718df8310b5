-- The option that a variant takes on one axis.
-- Grain: one row per experiment, variant and axis.
CREATE TABLE variant_axis (
    experiment VARCHAR NOT NULL,
    variant VARCHAR NOT NULL,
    axis VARCHAR NOT NULL,
    option VARCHAR NOT NULL,
    PRIMARY KEY (experiment, variant, axis)
);
COMMENT ON TABLE variant_axis IS 'The option that a variant takes on one axis. Grain: one row per experiment, variant and axis.';
COMMENT ON COLUMN variant_axis.experiment IS 'name of the experiment';
COMMENT ON COLUMN variant_axis.variant IS 'as in variant';
COMMENT ON COLUMN variant_axis.axis IS 'name of the axis; a column of the experiment''s own view';
COMMENT ON COLUMN variant_axis.option IS 'name of the option';
