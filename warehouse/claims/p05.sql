-- id: p05
-- statement: Removing the first or the last layer is a disaster, removing one in between is not.
-- published: qualitative
-- source: Efficient inference and compression (articles in Chinese), part 6; Men et al. 2024, arXiv:2403.03853
-- kind: measured
-- metric: mean KL without the first or the last layer over that without a middle one, the smaller
-- direction: above
-- threshold: 2
-- experiment: depth_pruning
WITH one AS (
    SELECT
        experiment, base, value, standard_error, TRY_CAST(layers_listed ->> '$[0]' AS BIGINT) AS layer, base_layers - 1 AS last_layer
    FROM compared
    WHERE metric = 'kl_mean_nats' AND kinds = 'prune_depth' AND layers_cut = 1 AND layers_listed IS NOT NULL AND status = 'ok' AND value > 0
), ratio AS (
    SELECT
        e.experiment, e.base, e.layer, e.value / m.value AS value, ratio_error(e.value, e.standard_error, m.value, m.standard_error) AS error,
        format('without {} {:.3g}, without {} {:.3g}', e.layer, e.value, m.layer, m.value) AS told
    FROM one AS e
    JOIN one AS m ON m.experiment = e.experiment AND m.base = e.base AND m.layer NOT IN (0, m.last_layer)
    WHERE e.layer IN (0, e.last_layer)
)
SELECT
    experiment, base, min(value) AS value, arg_min(error, value) AS error, count(*) AS n, string_agg(told, '; ' ORDER BY layer, told) AS detail
FROM ratio
GROUP BY experiment, base
HAVING count(DISTINCT layer) = 2;
