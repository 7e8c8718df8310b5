-- id: p06
-- statement: At 50 % Wanda is as good as SparseGPT; at 60 to 70 % and in 2:4 SparseGPT is ahead.
-- published: within 0.1 perplexity at 50 % (Llama-2-70B); both +0.86 in Wanda's own table
-- source: Sun et al. 2023, arXiv:2306.11695; Frantar and Alistarh 2023, arXiv:2301.00774
-- kind: measured
-- metric: mean KL of Wanda over that of SparseGPT at 50 %
-- direction: between
-- threshold: 0.9 1.1
-- experiment: sparsity
-- note: As good is read as within a tenth of the loss. detail has the ratios at more than 50 % and in 2:4.
WITH pair AS (
    SELECT
        w.experiment, w.base, coalesce(w.pattern, w.sparsity_pct || ' %') AS pattern, w.value / s.value AS ratio,
        ratio_error(w.value, w.standard_error, s.value, s.standard_error) AS error
    FROM compared AS w
    JOIN compared AS s
        ON s.experiment = w.experiment AND s.metric = w.metric AND s.kinds = w.kinds AND s.sparsity_method = 'sparsegpt' AND s.status = 'ok'
        AND s.sparsity_pct IS NOT DISTINCT FROM w.sparsity_pct AND s.pattern IS NOT DISTINCT FROM w.pattern
    WHERE w.metric = 'kl_mean_nats' AND w.status = 'ok' AND w.kinds = 'prune_weights' AND w.sparsity_method = 'wanda' AND s.value > 0
)
SELECT
    experiment, base, max(ratio) FILTER (pattern = '50 %') AS value, max(error) FILTER (pattern = '50 %') AS error, 1 AS n,
    string_agg(format('{}: {:.3f}', pattern, ratio), ', ' ORDER BY pattern) AS detail
FROM pair GROUP BY experiment, base;
