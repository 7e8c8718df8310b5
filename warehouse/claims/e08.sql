-- id: e08
-- statement: Multiple choice is the least sensitive suite.
-- published: qualitative
-- source: Efficient inference and compression (articles in Chinese), parts 4 and 6
-- kind: measured
-- metric: the smaller of the relative losses of generated answers and of needles less that of multiple choice, each the mean over compressed variants
-- direction: above
-- threshold: 0
-- experiment: degradation
WITH lost AS (
    SELECT
        experiment, base, metric, avg(1 - value / base_value) AS loss, mean_error(ratio_error(value, standard_error, base_value, base_standard_error)) AS error,
        min(base_value) AS least, count(*) AS n
    FROM compared
    WHERE metric IN ('accuracy', 'task_score', 'needle_accuracy') AND status = 'ok' AND base_status = 'ok' AND kinds <> '' AND base_value > 0
    GROUP BY experiment, base, metric
)
SELECT
    c.experiment, c.base, least(g.loss, h.loss) - c.loss AS value, difference_error(c.error, CASE WHEN g.loss <= h.loss THEN g.error ELSE h.error END) AS error,
    c.n, CASE WHEN least(g.least, h.least) < 0.05 THEN 'the base answers less than one in twenty' END AS reason,
    format('choice {:+.3f}, answers {:+.3f}, needles {:+.3f}', -c.loss, -g.loss, -h.loss) AS detail
FROM lost AS c
JOIN lost AS g ON g.experiment = c.experiment AND g.base = c.base AND g.metric = 'task_score'
JOIN lost AS h ON h.experiment = c.experiment AND h.base = c.base AND h.metric = 'needle_accuracy'
WHERE c.metric = 'accuracy';
