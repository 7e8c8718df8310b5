-- id: p20
-- statement: Of a mixture of experts the rare ones can go in a domain; merging them is steadier.
-- published: qualitative
-- source: Lu et al. 2024, arXiv:2402.14800
-- kind: larger
-- metric: mean KL with merged experts over that with the rare ones removed, as many left
-- direction: below
-- threshold: 1
-- experiment: larger
SELECT
    m.experiment, m.base, avg(m.value / f.value) AS value, mean_error(ratio_error(m.value, m.standard_error, f.value, f.standard_error)) AS error, count(*) AS n,
    string_agg(format('{} {:.3f}, {} {:.3f}', m.variant, m.value, f.variant, f.value), '; ') AS detail
FROM compared AS m
JOIN compared AS f
    ON f.experiment = m.experiment AND f.metric = m.metric AND f.kinds = 'prune_experts' AND f.experts_method = 'frequency' AND f.status = 'ok'
    AND f.steps = replace(m.steps, '"merge"', '"frequency"') AND f.value > 0
WHERE m.metric = 'kl_mean_nats' AND m.kinds = 'prune_experts' AND m.experts_method = 'merge' AND m.status = 'ok'
GROUP BY m.experiment, m.base;
