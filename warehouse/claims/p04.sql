-- id: p04
-- statement: What a contiguous run of removed layers does is more predictable than what scattered ones do.
-- published: qualitative
-- source: Gromov et al. 2024, arXiv:2403.17887
-- kind: measured
-- metric: 99th percentile of KL over its mean, of a contiguous run over the same of the least influential layers, as many, mean over pairs
-- direction: below
-- threshold: 1
-- experiment: depth_pruning
-- note: Our reading: the more predictable, the nearer the worst tokens are to the mean. detail says which costs less.
WITH spread AS (
    SELECT
        m.experiment, m.base, m.variant, m.layers_cut, m.depth_score, m.value AS mean, q.value / m.value AS spread,
        ratio_error(q.value, q.standard_error, m.value, m.standard_error) AS error
    FROM compared AS m
    JOIN compared AS q ON q.experiment = m.experiment AND q.variant = m.variant AND q.metric = 'kl_p99_nats' AND q.status = 'ok'
    WHERE m.metric = 'kl_mean_nats' AND m.status = 'ok' AND m.kinds = 'prune_depth' AND m.layers_cut > 1 AND m.value > 0 AND q.value > 0
)
SELECT
    c.experiment, c.base, avg(c.spread / s.spread) AS value, mean_error(ratio_error(c.spread, c.error, s.spread, s.error)) AS error, count(*) AS n,
    string_agg(format('{} costs {:.2f} nats, {} {:.2f}', c.variant, c.mean, s.variant, s.mean), '; ' ORDER BY c.variant) AS detail
FROM spread AS c
JOIN spread AS s ON s.experiment = c.experiment AND s.layers_cut = c.layers_cut AND s.depth_score = 'block_influence'
WHERE c.depth_score = 'angular'
GROUP BY c.experiment, c.base;
