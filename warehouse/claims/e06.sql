-- id: e06
-- statement: A difference of one or two points lies inside the noise of a single sampling run.
-- published: 1 to 2 points
-- source: Efficient inference and compression (articles in Chinese), part 4
-- kind: measured
-- metric: 1.96 standard deviations of a task's score from one sampling run to the next, mean over tasks
-- direction: at_least
-- threshold: 0.02
-- experiment: protocols
-- note: The error of a standard deviation of n runs is taken as that over √(2 (n − 1)).
SELECT
    s.experiment, s.base, avg(1.96 * s.value) AS value, avg(1.96 * s.value / sqrt(2 * (s.n - 1.0))) AS error, sum(s.n) AS n,
    string_agg(format('{} {:.3f}', s.slice, s.value), ', ' ORDER BY s.slice, s.value) AS detail
FROM by_slice AS s JOIN made_of AS m ON m.experiment = s.experiment AND m.variant = s.variant
WHERE s.metric = 'task_sample_spread' AND s.slice_kind = 'task' AND NOT contains(s.slice, '/') AND s.status = 'ok' AND s.n > 1 AND m.kinds = ''
GROUP BY s.experiment, s.base;
