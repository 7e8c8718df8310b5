-- id: q19
-- statement: The more tokens a model was trained on, the more the same rounding costs it.
-- published: 0.3 to 0.5 perplexity against 0.1 (Llama 3 against Llama 2, 4 bits)
-- source: Efficient inference and compression (articles in Chinese), part 3; Kumar et al. 2024, arXiv:2411.04330
-- kind: measured
-- metric: rise of the log perplexity by rounding, of the model with the most tokens over that with the fewest, shape and rounding the same
-- direction: above
-- threshold: 1
-- experiment: deep_or_wide
-- note: Of models of ten million weights that read 131 thousand and 524 thousand tokens, where the published ones read 2 and 15 · 10¹².
WITH rise AS (
    SELECT
        q.experiment, q.base, q.quantize, q.pretrain_layers, q.pretrain_tied, q.pretrain_tokens, q.variant, ln(q.value / b.value) AS rise,
        difference_error(q.standard_error / q.value, b.standard_error / b.value) AS error
    FROM compared AS q
    JOIN compared AS b ON b.experiment = q.experiment AND b.metric = q.metric AND b.steps = q.but_quantize
    WHERE q.metric = 'perplexity' AND q.value > 0 AND b.value > 0 AND q.kinds = 'pretrain quantize' AND b.kinds = 'pretrain' AND q.status = 'ok' AND b.status = 'ok'
)
SELECT
    a.experiment, a.base, avg(a.rise / b.rise) AS value, mean_error(ratio_error(a.rise, a.error, b.rise, b.error)) AS error, count(*) AS n,
    string_agg(format('{} {:.4f}, {} {:.4f}', a.variant, a.rise, b.variant, b.rise), '; ') AS detail
FROM rise AS a
JOIN rise AS b
    ON b.experiment = a.experiment AND b.quantize = a.quantize AND b.pretrain_layers = a.pretrain_layers AND b.pretrain_tied = a.pretrain_tied
    AND b.pretrain_tokens < a.pretrain_tokens AND b.rise > 0
GROUP BY a.experiment, a.base;
