-- How does each metric of a variant stand beside that of the unchanged base of the same experiment, under the same protocol and device?
-- Grain: one row per experiment, variant and metric. difference: variant − base, in `unit`. ratio: variant ÷ base; NULL where the base has 0.
-- status, base_status: a difference of a noisy timing is shown, not to be ranked.
CREATE OR REPLACE VIEW versus_base AS
SELECT
    mine.experiment, mine.variant, mine.suite, mine.protocol, mine.metric, mine.unit, mine.better, mine.value, theirs.value AS base_value,
    mine.value - theirs.value AS difference, mine.value / nullif(theirs.value, 0) AS ratio, mine.status, theirs.status AS base_status
FROM headline AS mine
JOIN base_variant AS b ON b.experiment = mine.experiment AND b.variant <> mine.variant
LEFT JOIN headline AS theirs ON theirs.experiment = b.experiment AND theirs.variant = b.variant AND theirs.metric = mine.metric;
