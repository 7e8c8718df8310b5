-- id: q10
-- statement: Eight bits for weights and activations, integers or FP8, are close to lossless.
-- published: qualitative
-- source: Efficient inference and compression (articles in Chinese), part 3; Xiao et al. 2022, arXiv:2211.10438
-- kind: measured
-- metric: mean KL in nats of the worse of the two, each in its best variant
-- direction: at_most
-- threshold: 0.01
-- experiment: quantization
-- note: Close to lossless: no more than the least that is published of 4 bits (e01). The FP8 here is of the weights alone.
WITH best AS (
    SELECT
        experiment, base, CASE WHEN format = 'fp8_e4m3' THEN 'FP8' ELSE 'W8A8' END AS kind, min(value) AS value,
        arg_min(standard_error, value) AS error, arg_min(variant, value) AS variant
    FROM compared
    WHERE metric = 'kl_mean_nats' AND status = 'ok' AND kinds IN ('quantize', 'smooth quantize')
    AND (format = 'fp8_e4m3' OR (format = 'int8' AND inputs_format = 'int8'))
    GROUP BY ALL
)
SELECT
    experiment, base, max(value) AS value, arg_max(error, value) AS error, count(*) AS n,
    string_agg(format('{} {:.4f} ({})', kind, value, variant), ', ' ORDER BY kind) AS detail
FROM best GROUP BY experiment, base HAVING count(*) = 2;
