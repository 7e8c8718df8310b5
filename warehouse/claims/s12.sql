-- id: s12
-- statement: An answer that is forced into a form far from what the model would write is right less often.
-- published: qualitative
-- source: Tam et al. 2024, arXiv:2408.02442
-- kind: measured
-- metric: share of right greedy answers under the constraint less that of free ones
-- direction: below
-- threshold: 0
-- experiment: protocols
-- note: Our built-in prompts want short answers, whose form is near to what a model says; the published loss is of reasoning in JSON.
SELECT
    f.experiment, f.base, c.value - f.value AS value, difference_error(c.standard_error, f.standard_error) AS error, f.n,
    format('free {:.3f}, constrained {:.3f}', f.value, c.value) AS detail
FROM compared AS f
JOIN compared AS c ON c.experiment = f.experiment AND c.variant = f.variant AND c.metric = 'constrained_accuracy'
WHERE f.metric = 'free_accuracy' AND f.kinds = '';
