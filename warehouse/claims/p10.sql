-- id: p10
-- statement: Made as small, a narrower model recovers better and a shallower one is faster.
-- published: 1 to 3 points better; 1.8 times faster
-- source: Muralidharan et al. 2024, arXiv:2407.14679; Sreenivas et al. 2024, arXiv:2408.11796
-- kind: measured
-- metric: the larger of two ratios, the best narrower variant over the shallower one, both distilled alike: of perplexity, and of decoding speed
-- direction: below
-- threshold: 1
-- experiment: width_or_depth
WITH student AS (
    SELECT
        p.experiment, p.base, p.variant, p.kinds, p.distill, p.value AS perplexity, p.standard_error AS error, t.value AS speed, t.standard_error AS speed_error,
        t.status, s.value AS size
    FROM compared AS p
    JOIN compared AS t ON t.experiment = p.experiment AND t.variant = p.variant AND t.metric = 'decode_tok_s' AND t.value > 0 AND p.value > 0
    JOIN compared AS s ON s.experiment = p.experiment AND s.variant = p.variant AND s.metric = 'size_bytes' AND s.value > 0
    WHERE p.metric = 'perplexity' AND p.status = 'ok' AND p.kinds IN ('prune_width distill', 'prune_depth distill') AND p.distill_loss <> 'cross_entropy'
)
SELECT
    w.experiment, w.base, greatest(w.perplexity / d.perplexity, w.speed / d.speed) AS value,
    CASE
        WHEN w.perplexity / d.perplexity >= w.speed / d.speed THEN ratio_error(w.perplexity, w.error, d.perplexity, d.error)
        ELSE ratio_error(w.speed, w.speed_error, d.speed, d.speed_error)
    END AS error, 2 AS n,
    CASE WHEN 'noisy' IN (w.status, d.status) THEN 'a timing was noisy' WHEN abs(w.size / d.size - 1) > 0.03 THEN 'their sizes differ by more than 3 %' END AS reason,
    format('{}: perplexity {:.3f} times that of {}, speed {:.2f} times', w.variant, w.perplexity / d.perplexity, d.variant, w.speed / d.speed) AS detail
FROM student AS w
JOIN student AS d ON d.experiment = w.experiment AND d.distill = w.distill AND d.kinds = 'prune_depth distill'
WHERE w.kinds = 'prune_width distill'
QUALIFY row_number() OVER (PARTITION BY w.experiment, w.base ORDER BY w.perplexity, d.perplexity, w.variant) = 1;
