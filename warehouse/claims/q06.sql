-- id: q06
-- statement: At 4 bits GPTQ is far better than rounding to the nearest.
-- published: perplexity 8.34 to 10.54 by rounding, to 8.68 by GPTQ (OPT-175B)
-- source: Frantar et al. 2022, arXiv:2210.17323
-- kind: measured
-- metric: mean KL of GPTQ over that of rounding, the same format, groups and range, mean over pairs
-- direction: below
-- threshold: 0.5
-- experiment: quantization
-- note: Far better is read as less than half the loss; the published losses are 0.34 and 2.2, a ratio of 0.15.
SELECT
    g.experiment, g.base, avg(g.value / r.value) AS value, mean_error(ratio_error(g.value, g.standard_error, r.value, r.standard_error)) AS error,
    count(*) AS n, string_agg(format('{} {:.3f} against {} {:.3f}', g.variant, g.value, r.variant, r.value), '; ' ORDER BY g.variant) AS detail
FROM compared AS g
JOIN compared AS r
    ON r.experiment = g.experiment AND r.metric = g.metric AND r.format = g.format AND r.group_size = g.group_size AND r.is_symmetric = g.is_symmetric
    AND r.weight_range = g.weight_range AND r.but_quantize = g.but_quantize AND r.quantize_method = 'rtn' AND r.inputs_format IS NULL
WHERE g.metric = 'kl_mean_nats' AND g.quantize_method = 'gptq' AND g.format = 'int4' AND g.inputs_format IS NULL AND g.act_order <> 'none'
AND g.kinds = 'quantize' AND g.status = 'ok' AND r.status = 'ok' AND r.value > 0
GROUP BY g.experiment, g.base;
