-- id: e09
-- statement: Answers taken by constrained decoding and answers read from free text give scores that differ by points.
-- published: several points
-- source: Efficient inference and compression (articles in Chinese), part 1
-- kind: measured
-- metric: difference between the shares of right greedy answers, free and constrained, whichever is more
-- direction: at_least
-- threshold: 0.02
-- experiment: protocols
-- note: On our built-in prompts of short answers. Points, in the plural, are two or more.
SELECT
    f.experiment, f.base, abs(c.value - f.value) AS value, difference_error(c.standard_error, f.standard_error) AS error, f.n,
    format('free {:.3f}, constrained {:.3f}', f.value, c.value) AS detail
FROM compared AS f
JOIN compared AS c ON c.experiment = f.experiment AND c.variant = f.variant AND c.metric = 'constrained_accuracy'
WHERE f.metric = 'free_accuracy' AND f.kinds = '';
