-- id: q08
-- statement: Which input channels matter is told by their activations and not by their weights: protecting the former recovers nearly all, the latter does not.
-- published: qualitative (1 % of the channels in 16 bits)
-- source: Lin et al. 2023, §3.1, arXiv:2306.00978
-- kind: measured
-- metric: mean KL with scales by activation over that with scales by weight, the same rounding
-- direction: below
-- threshold: 1
-- experiment: quantization
-- note: Channels are scaled up, as AWQ does in the end, and not kept in 16 bits.
SELECT
    a.experiment, a.base, avg(a.value / w.value) AS value, mean_error(ratio_error(a.value, a.standard_error, w.value, w.standard_error)) AS error,
    count(*) AS n, string_agg(format('{} {:.3f} against {} {:.3f}', a.variant, a.value, w.variant, w.value), '; ' ORDER BY a.variant) AS detail
FROM compared AS a
JOIN compared AS w
    ON w.experiment = a.experiment AND w.metric = a.metric AND w.kinds = a.kinds AND w.quantize = a.quantize AND w.salience = 'weights'
WHERE a.metric = 'kl_mean_nats' AND a.smooth = 'awq' AND a.salience = 'inputs' AND a.kinds = 'smooth quantize' AND a.status = 'ok' AND w.status = 'ok'
AND w.value > 0
GROUP BY a.experiment, a.base;
