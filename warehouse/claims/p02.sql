-- id: p02
-- statement: Without a quarter of its layers a model's perplexity rises by 0.3 to 1, and generated answers halve.
-- published: +0.3 to +1 perplexity (70B)
-- source: Efficient inference and compression (articles in Chinese), part 6; Gromov et al. 2024, arXiv:2403.17887
-- kind: measured
-- metric: rise of perplexity without 20 to 30 % of the layers and without recovery, the best variant
-- direction: between
-- threshold: 0.3 1
-- experiment: depth_pruning
-- note: What generated answers lose is e02 and e08; small models lose far more.
SELECT
    experiment, base, value, standard_error AS error, n, format('{}: {} of {} layers', variant, layers_cut, base_layers) AS detail
FROM compared
WHERE metric = 'perplexity_delta' AND status = 'ok' AND kinds = 'prune_depth' AND layers_cut / base_layers BETWEEN 0.2 AND 0.3
QUALIFY row_number() OVER (PARTITION BY experiment, base ORDER BY value, variant) = 1;
