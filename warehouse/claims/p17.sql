-- id: p17
-- statement: Without its retrieval heads a model fails needles, and its perplexity does not show it.
-- published: qualitative
-- source: Wu et al. 2024, arXiv:2404.15574
-- kind: measured
-- metric: relative loss of needles less the relative rise of perplexity, without the heads that score highest in retrieval, beside the same of random heads
-- direction: above
-- threshold: 0
-- experiment: heads
-- note: Needs the suite needle in that experiment.
WITH cut AS (
    SELECT
        h.experiment, h.base, h.heads_by, h.base_value, 1 - h.value / h.base_value - (p.value / p.base_value - 1) AS gap,
        difference_error(ratio_error(h.value, h.standard_error, h.base_value, h.base_standard_error), ratio_error(p.value, p.standard_error, p.base_value, p.base_standard_error)) AS error,
        format('{}: needles {:+.3f}, perplexity {:+.3f}', h.variant, h.value / h.base_value - 1, p.value / p.base_value - 1) AS told
    FROM compared AS h
    JOIN compared AS p ON p.experiment = h.experiment AND p.variant = h.variant AND p.metric = 'perplexity' AND p.status = 'ok' AND p.base_value > 0
    WHERE h.metric = 'needle_accuracy' AND h.status = 'ok' AND h.kinds = 'prune_width' AND h.base_value > 0 AND (h.heads_by = 'random' OR h.heads_cut = 'most')
)
SELECT
    a.experiment, a.base, avg(a.gap - b.gap) AS value, mean_error(difference_error(a.error, b.error)) AS error, count(*) AS n,
    CASE WHEN min(a.base_value) < 0.05 THEN 'the base finds less than one in twenty' END AS reason, string_agg(DISTINCT a.told || '; ' || b.told, '; ') AS detail
FROM cut AS a JOIN cut AS b ON b.experiment = a.experiment AND b.base = a.base AND b.heads_by = 'random'
WHERE a.heads_by = 'retrieval'
GROUP BY a.experiment, a.base;
