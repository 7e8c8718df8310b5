-- Which kinds of work did a variant lose, beside the unchanged base and on the same items?
-- Grain: one row per experiment, variant, protocol and kind of work: a task of choice or generation, or needle. base_value: share of the base's items that
-- are right. difference: variant − base, a share; low, high: its 95 % interval; n: items. relative: difference ÷ base_value. finding: as in paired.
CREATE OR REPLACE VIEW work AS
SELECT
    p.experiment, p.variant, p.suite, p.protocol, coalesce(nullif(split_part(p.metric, '/', 2), ''), p.suite) AS work, o.value AS base_value, p.difference,
    p.low, p.high, p.n, p.p, p.p_holm, p.detectable, p.finding, p.difference / nullif(o.value, 0) AS relative
FROM paired AS p
JOIN base_variant AS b ON b.experiment = p.experiment AND b.variant = p.other
LEFT JOIN by_slice AS o
    ON o.experiment = p.experiment AND o.variant = p.other AND o.protocol_digest = p.protocol_digest
    AND o.metric = CASE split_part(p.metric, '/', 1) WHEN 'score' THEN 'task_score' ELSE split_part(p.metric, '/', 1) END
    AND o.slice = coalesce(nullif(split_part(p.metric, '/', 2), ''), 'all') AND o.slice_kind IN ('task', 'all')
WHERE p.suite IN ('choice', 'generation', 'needle') AND split_part(p.metric, '/', 1) IN ('accuracy', 'score', 'needle_accuracy');
