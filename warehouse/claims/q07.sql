-- id: q07
-- statement: On GPTQ at 4 bits each rung gains a little perplexity: order of activation 0.05 to 0.2, a searched range 0.1 to 0.2, scales of AWQ 0.02 to 0.05.
-- published: 0.05 to 0.2, 0.1 to 0.2, 0.02 to 0.05
-- source: Efficient inference and compression (articles in Chinese), part 3; Frantar et al. 2022, arXiv:2210.17323; Lin et al. 2023, arXiv:2306.00978
-- kind: measured
-- metric: the least gain of the three, in perplexity
-- direction: at_least
-- threshold: 0.02
-- experiment: quantization
WITH rung AS (
    SELECT
        experiment, base, value, standard_error,
        CASE
            WHEN kinds = 'quantize' AND weight_range = 'minmax' AND act_order = 'none' THEN 'left'
            WHEN kinds = 'quantize' AND weight_range = 'minmax' THEN 'order'
            WHEN kinds = 'quantize' AND weight_range = 'output_mse' AND act_order <> 'none' THEN 'range'
            WHEN kinds = 'smooth quantize' AND smooth = 'awq' AND salience = 'inputs' AND weight_range = 'output_mse' THEN 'scales'
        END AS name
    FROM compared
    WHERE metric = 'perplexity' AND quantize_method = 'gptq' AND format = 'int4' AND is_symmetric AND inputs_format IS NULL AND status = 'ok'
), gain AS (
    SELECT
        a.experiment, a.base, b.name, a.value - b.value AS gained, difference_error(a.standard_error, b.standard_error) AS error
    FROM rung AS a
    JOIN rung AS b ON b.experiment = a.experiment AND (a.name, b.name) IN (('left', 'order'), ('order', 'range'), ('range', 'scales'))
)
SELECT
    experiment, base, min(gained) AS value, arg_min(error, gained) AS error, count(*) AS n,
    string_agg(format('{} {:+.3f}', name, gained), ', ' ORDER BY name) AS detail
FROM gain GROUP BY experiment, base HAVING count(*) = 3;
