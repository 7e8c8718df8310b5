-- What is known of each variant, over all samples? The splits are in `by_slice`.
-- Grain: one row per experiment, variant, protocol, metric and seed; a timing also per device. value, standard_error: in `unit`.
CREATE OR REPLACE VIEW fact AS
SELECT * EXCLUDE (slice_kind, slice) FROM by_slice WHERE slice_kind = 'all';
