-- id: e01
-- statement: A 4-bit model is 0.01 to 0.05 nat from its base on average; above 0.1 its tasks suffer.
-- published: 0.01 to 0.05 nat (8B); llama.cpp on Llama-3-8B 0.031 (q4_K_M) and 0.072 (q4_0)
-- source: Efficient inference and compression (articles in Chinese), part 4
-- kind: measured
-- metric: mean KL in nats of the best 4-bit variant whose activations are not rounded
-- direction: between
-- threshold: 0.01 0.05
-- experiment: quantization
-- note: The best of what was measured; small models lose more.
SELECT
    experiment, base, value, standard_error AS error, n,
    format('{}, of {} variants', variant, count(*) OVER (PARTITION BY experiment, base)) AS detail
FROM compared
WHERE metric = 'kl_mean_nats' AND status = 'ok' AND bits = 4 AND kinds = 'quantize' AND inputs_format IS NULL
QUALIFY row_number() OVER (PARTITION BY experiment, base ORDER BY value, variant) = 1;
