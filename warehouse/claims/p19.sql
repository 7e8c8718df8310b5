-- id: p19
-- statement: Small models are better with one matrix for embedding and head.
-- published: qualitative (and with grouped keys and values)
-- source: Liu et al. 2024, MobileLLM, arXiv:2402.14905
-- kind: measured
-- metric: perplexity with one matrix over that with two, layers, tokens and all weights the same
-- direction: below
-- threshold: 1
-- experiment: deep_or_wide
-- note: Grouped keys and values are not varied.
SELECT
    t.experiment, t.base, t.value / u.value AS value, ratio_error(t.value, t.standard_error, u.value, u.standard_error) AS error, 2 AS n,
    format('{} {:.4g}, {} {:.4g}', t.variant, t.value, u.variant, u.value) AS detail
FROM compared AS t
JOIN compared AS u
    ON u.experiment = t.experiment AND u.metric = t.metric AND u.kinds = 'pretrain' AND u.pretrain_tokens = t.pretrain_tokens
    AND u.pretrain_layers = t.pretrain_layers AND NOT u.pretrain_tied AND u.value > 0
WHERE t.metric = 'perplexity' AND t.kinds = 'pretrain' AND t.pretrain_tied AND t.status = 'ok'
QUALIFY row_number() OVER (PARTITION BY t.experiment, t.base ORDER BY t.variant, u.variant) = 1;
