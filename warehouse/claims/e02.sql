-- id: e02
-- statement: Perplexity hides what tasks lose: at 4 bits it rises by a few percent, and generated answers and needles lose more.
-- published: +0.36 perplexity, MMLU −1 to −2, GSM8K −3 to −6, needles −10 and more (Llama-3-8B, GPTQ, groups of 128)
-- source: Efficient inference and compression (articles in Chinese), part 4
-- kind: measured
-- metric: relative loss of generated answers and of needles, their mean, less the relative rise of perplexity, mean over 4-bit variants
-- direction: above
-- threshold: 0
-- experiment: degradation
WITH lost AS (
    SELECT
        experiment, base, variant, metric, base_value, CASE WHEN metric = 'perplexity' THEN value / base_value - 1 ELSE 1 - value / base_value END AS loss,
        ratio_error(value, standard_error, base_value, base_standard_error) AS error
    FROM compared
    WHERE metric IN ('perplexity', 'task_score', 'needle_accuracy') AND status = 'ok' AND base_status = 'ok' AND bits = 4 AND kinds = 'quantize' AND base_value > 0
)
SELECT
    p.experiment, p.base, avg((g.loss + h.loss) / 2 - p.loss) AS value, mean_error(difference_error(p.error, difference_error(g.error, h.error) / 2)) AS error,
    count(*) AS n, CASE WHEN min(least(g.base_value, h.base_value)) < 0.05 THEN 'the base answers less than one in twenty' END AS reason,
    string_agg(format('{}: perplexity {:+.3f}, answers {:+.3f}, needles {:+.3f}', p.variant, p.loss, -g.loss, -h.loss), '; ' ORDER BY p.variant) AS detail
FROM lost AS p
JOIN lost AS g ON g.experiment = p.experiment AND g.variant = p.variant AND g.metric = 'task_score'
JOIN lost AS h ON h.experiment = p.experiment AND h.variant = p.variant AND h.metric = 'needle_accuracy'
WHERE p.metric = 'perplexity'
GROUP BY p.experiment, p.base;
