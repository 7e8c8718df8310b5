-- id: d09
-- statement: A draft step of EAGLE costs 0.02 to 0.05 of a step of a 70B target; one of an 8B model 0.11.
-- published: 0.02 to 0.05 (70B)
-- source: Efficient inference and compression (articles in Chinese), part 2; sources for an 8B target give 0.16 to 0.22
-- kind: measured
-- metric: time of a draft step over that of a target step, the cheapest draft that is a model
-- direction: between
-- threshold: 0.02 0.05
-- experiment: larger
SELECT
    m.experiment, m.base, min(s.value) AS value, 0 AS error, count(*) AS n, 'another kind of draft, on a target of another size' AS reason,
    string_agg(DISTINCT format('{} {:.3f}', m.variant, s.value), ', ') AS detail
FROM by_slice AS s
JOIN made_of AS m ON m.experiment = s.experiment AND m.variant = s.variant
WHERE s.metric = 'draft_cost_ratio' AND s.slice_kind = 'all' AND s.value IS NOT NULL AND m.draft_method = 'variant'
GROUP BY m.experiment, m.base;
