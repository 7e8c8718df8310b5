-- id: q12
-- statement: Rotated, a model can be run with weights and activations of 4 bits.
-- published: perplexity 3.32 to 3.73 (Llama-2-70B), hundreds without; others report up to 3.61 or 3.9
-- source: Ashkboos et al. 2024, arXiv:2404.00456
-- kind: measured
-- metric: relative rise of perplexity, the best rotation, weights and activations in int4
-- direction: at_most
-- threshold: 0.125
-- experiment: quantization
-- note: The bound is the published rise, 0.41 of 3.32, rounded up.
SELECT
    r.experiment, r.base, r.value / r.base_value - 1 AS value, ratio_error(r.value, r.standard_error, r.base_value, r.base_standard_error) AS error, 1 AS n,
    format('{}: {:.4g} of {:.4g}; without {:.4g}', r.variant, r.value, r.base_value, p.value) AS detail
FROM compared AS r
LEFT JOIN compared AS p
    ON p.experiment = r.experiment AND p.metric = r.metric AND p.quantize = r.quantize AND p.kinds = 'quantize'
WHERE r.metric = 'perplexity' AND r.status = 'ok' AND r.rotate IS NOT NULL AND r.kinds = 'rotate quantize' AND r.base_value > 0 AND r.format = 'int4' AND r.inputs_format = 'int4'
QUALIFY row_number() OVER (PARTITION BY r.experiment, r.base ORDER BY r.value, r.variant) = 1;
