-- Does each declared budget hold?
-- Grain: one row per experiment, variant and bound. at_most, at_least, value: in `unit`. blocks: a breach fails the run.
-- verdict: holds, breached, or not_measured: no number, or a noisy timing, which can be neither; status says which.
CREATE OR REPLACE VIEW verdict AS
SELECT
    b.experiment, b.variant, b.metric, CASE
        WHEN h.value IS NULL OR h.status <> 'ok' THEN 'not_measured'
        WHEN h.value > b.at_most OR h.value < b.at_least THEN 'breached'
        ELSE 'holds'
    END AS verdict, h.value, b.at_most, b.at_least, h.unit, h.standard_error, h.status, b.blocks, h.protocol, b.recorded_at
FROM budget AS b
LEFT JOIN experiment AS e ON e.experiment = b.experiment
LEFT JOIN headline AS h ON h.experiment = b.experiment AND h.variant = b.variant AND h.metric = b.metric
-- What an experiment no longer declares is history.
WHERE e.experiment IS NULL OR (list_contains(e.variants, b.variant) AND b.recorded_at >= e.declared_at);
