-- id: k03
-- statement: Keys and values in FP8 add about 0.001 nat.
-- published: of the order of 0.001 nat
-- source: Efficient inference and compression (articles in Chinese), part 5
-- kind: measured
-- metric: mean KL in nats of the base with keys and values in FP8
-- direction: between
-- threshold: 0.0005 0.0015
-- experiment: combinations
SELECT experiment, base, value, standard_error AS error, n, variant AS detail
FROM compared WHERE metric = 'kl_mean_nats' AND status = 'ok' AND kinds = 'kv' AND kv_format = 'fp8_e4m3'
QUALIFY row_number() OVER (PARTITION BY experiment, base ORDER BY variant) = 1;
