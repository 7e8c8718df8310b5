-- id: p12
-- statement: Distillation brings most of what pruning took back, reasoning last.
-- published: qualitative
-- source: Efficient inference and compression (articles in Chinese), part 6; Muralidharan et al. 2024, arXiv:2407.14679
-- kind: measured
-- metric: share of the gap in log perplexity that distillation closed, mean over pruned variants
-- direction: at_least
-- threshold: 0.5
-- experiment: depth_pruning
-- note: Most is more than half. The interval is over variants. What of reasoning comes back needs tasks measured along the way.
SELECT
    experiment, base, avg(value) AS value, stddev_samp(value) / sqrt(count(*)) AS error, count(*) AS n,
    string_agg(format('{} {:.2f}', variant, value), ', ' ORDER BY variant) AS detail
FROM compared
WHERE metric = 'regained_share' AND status = 'ok' AND distill_loss <> 'cross_entropy' AND kinds LIKE 'prune%distill'
GROUP BY experiment, base;
