-- id: e03
-- statement: What has many steps or a long context is lost first.
-- published: qualitative (multi-step problems, long context, other languages and code, details of instructions)
-- source: Efficient inference and compression (articles in Chinese), part 4
-- kind: measured
-- metric: relative loss of generated answers and of needles, their mean, less that of multiple choice, mean over compressed variants
-- direction: above
-- threshold: 0
-- experiment: degradation
-- note: Languages are e05.
WITH lost AS (
    SELECT
        experiment, base, variant, metric, base_value, 1 - value / base_value AS loss, ratio_error(value, standard_error, base_value, base_standard_error) AS error
    FROM compared
    WHERE metric IN ('accuracy', 'task_score', 'needle_accuracy') AND status = 'ok' AND base_status = 'ok' AND kinds <> '' AND base_value > 0
)
SELECT
    c.experiment, c.base, avg((g.loss + h.loss) / 2 - c.loss) AS value, mean_error(difference_error(c.error, difference_error(g.error, h.error) / 2)) AS error,
    count(*) AS n, CASE WHEN min(least(g.base_value, h.base_value)) < 0.05 THEN 'the base answers less than one in twenty' END AS reason,
    string_agg(format('{}: choice {:+.3f}, answers {:+.3f}, needles {:+.3f}', c.variant, -c.loss, -g.loss, -h.loss), '; ' ORDER BY c.variant) AS detail
FROM lost AS c
JOIN lost AS g ON g.experiment = c.experiment AND g.variant = c.variant AND g.metric = 'task_score'
JOIN lost AS h ON h.experiment = c.experiment AND h.variant = c.variant AND h.metric = 'needle_accuracy'
WHERE c.metric = 'accuracy'
GROUP BY c.experiment, c.base;
