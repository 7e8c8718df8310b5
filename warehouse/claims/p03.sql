-- id: p03
-- statement: Up to a cliff, at 30 % of the layers of a 13B and 40 to 45 % of a 70B model, multiple choice stays flat as layers go, while perplexity rises all along.
-- published: flat up to 30 %
-- source: Gromov et al. 2024, arXiv:2403.17887
-- kind: measured
-- metric: relative loss of multiple choice with the most layers removed of up to 30 %
-- direction: at_most
-- threshold: 0.05
-- experiment: degradation
-- note: Flat is read as less than a twentieth.
SELECT
    experiment, base, 1 - value / base_value AS value, ratio_error(value, standard_error, base_value, base_standard_error) AS error, n,
    format('{}: {} of {} layers', variant, layers_cut, base_layers) AS detail
FROM compared
WHERE metric = 'accuracy' AND status = 'ok' AND base_value > 0 AND kinds = 'prune_depth' AND layers_cut / base_layers <= 0.3
QUALIFY row_number() OVER (PARTITION BY experiment, base ORDER BY layers_cut DESC, value DESC, variant) = 1;
