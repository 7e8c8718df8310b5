-- id: p18
-- statement: Of small models of one size the deep and narrow is better than the shallow and wide.
-- published: 30 layers of 512 over 12 of 768, by a few points
-- source: Liu et al. 2024, MobileLLM, arXiv:2402.14905
-- kind: measured
-- metric: perplexity of the deepest over that of the shallowest, tokens and tying the same
-- direction: below
-- threshold: 1
-- experiment: deep_or_wide
SELECT
    d.experiment, d.base, d.value / w.value AS value, ratio_error(d.value, d.standard_error, w.value, w.standard_error) AS error, 2 AS n,
    format('{} layers {:.4g}, {} layers {:.4g}', d.pretrain_layers, d.value, w.pretrain_layers, w.value) AS detail
FROM compared AS d
JOIN compared AS w
    ON w.experiment = d.experiment AND w.metric = d.metric AND w.kinds = 'pretrain' AND w.pretrain_tokens = d.pretrain_tokens
    AND w.pretrain_tied = d.pretrain_tied AND w.pretrain_layers < d.pretrain_layers AND w.value > 0
WHERE d.metric = 'perplexity' AND d.kinds = 'pretrain' AND d.status = 'ok'
QUALIFY row_number() OVER (PARTITION BY d.experiment, d.base ORDER BY d.pretrain_layers DESC, w.pretrain_layers, d.variant, w.variant) = 1;
