-- id: p11
-- statement: After pruning, learning from the base's distributions brings back more than learning from the same text.
-- published: 3 to 4 points of MMLU (94 billion tokens)
-- source: Muralidharan et al. 2024, arXiv:2407.14679
-- kind: measured
-- metric: perplexity after distillation over that after cross-entropy, everything else the same, mean over pairs
-- direction: below
-- threshold: 1
-- experiment: depth_pruning
-- note: Perplexity, which cross-entropy minimises, and not the KL that distillation does.
SELECT
    k.experiment, k.base, avg(k.value / t.value) AS value, mean_error(ratio_error(k.value, k.standard_error, t.value, t.standard_error)) AS error, count(*) AS n,
    string_agg(format('{} {:.4g}, {} {:.4g}', k.variant, k.value, t.variant, t.value), '; ' ORDER BY k.variant) AS detail
FROM compared AS k
JOIN compared AS t
    ON t.experiment = k.experiment AND t.metric = k.metric AND t.but_distill = k.but_distill AND t.kinds = k.kinds AND t.distill_loss = 'cross_entropy' AND t.value > 0
    AND json_merge_patch(t.distill, '{"loss": null}') = json_merge_patch(k.distill, '{"loss": null}')
WHERE k.metric = 'perplexity' AND k.status = 'ok' AND k.distill_loss <> 'cross_entropy'
GROUP BY k.experiment, k.base;
