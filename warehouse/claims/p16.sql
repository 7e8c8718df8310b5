-- id: p16
-- statement: Pruning, then distilling, then quantizing is better than any other order.
-- published: qualitative
-- source: Efficient inference and compression (articles in Chinese), part 6
-- kind: measured
-- metric: mean KL in that order over that in the best other order of the same steps
-- direction: below
-- threshold: 1
-- experiment: prune_distill_quantize
-- note: Needs a variant with the same kinds of steps in another order; that experiment has none, since rounded weights are not trained here.
SELECT
    a.experiment, a.base, a.value / b.value AS value, ratio_error(a.value, a.standard_error, b.value, b.standard_error) AS error, 2 AS n,
    format('{} {:.3f}, {} {:.3f}', a.variant, a.value, b.variant, b.value) AS detail
FROM compared AS a
JOIN compared AS b
    ON b.experiment = a.experiment AND b.metric = a.metric AND b.kinds <> a.kinds AND b.status = 'ok' AND b.value > 0
    AND list_sort(string_split(b.steps, '},{')) = list_sort(string_split(a.steps, '},{'))
WHERE a.metric = 'kl_mean_nats' AND a.status = 'ok' AND regexp_matches(a.kinds, '^prune_\w+ distill quantize$')
QUALIFY row_number() OVER (PARTITION BY a.experiment, a.base ORDER BY a.value, b.value, b.variant) = 1;
