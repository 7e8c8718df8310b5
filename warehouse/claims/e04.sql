-- id: e04
-- statement: The 99th percentile of KL says more of what tasks lose than its mean does.
-- published: qualitative
-- source: Efficient inference and compression (articles in Chinese), part 4
-- kind: measured
-- metric: rank correlation over variants of the loss of generated answers with the 99th percentile, less that with the mean
-- direction: above
-- threshold: 0
-- experiment: degradation
-- note: The interval takes the two correlations as independent, which is too wide; it needs four variants.
WITH ranked AS (
    SELECT
        t.experiment, t.base, rank() OVER (PARTITION BY t.experiment ORDER BY -t.value) AS lost,
        rank() OVER (PARTITION BY t.experiment ORDER BY m.value) AS mean, rank() OVER (PARTITION BY t.experiment ORDER BY q.value) AS tail
    FROM compared AS t
    JOIN compared AS m ON m.experiment = t.experiment AND m.variant = t.variant AND m.metric = 'kl_mean_nats' AND m.status = 'ok'
    JOIN compared AS q ON q.experiment = t.experiment AND q.variant = t.variant AND q.metric = 'kl_p99_nats' AND q.status = 'ok'
    WHERE t.metric = 'task_score' AND t.status = 'ok' AND t.kinds <> ''
)
SELECT
    experiment, base, corr(lost, tail) - corr(lost, mean) AS value, sqrt(2 / greatest(count(*) - 3.0, 1)) AS error, count(*) AS n,
    format('{:.3f} with the 99th percentile, {:.3f} with the mean', corr(lost, tail), corr(lost, mean)) AS detail
FROM ranked GROUP BY experiment, base HAVING count(*) > 3 AND isfinite(corr(lost, tail)) AND isfinite(corr(lost, mean));
