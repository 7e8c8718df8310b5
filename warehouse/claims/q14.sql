-- id: q14
-- statement: Weights of 4 bits pay in decoding one text and cost in prefill.
-- published: 2.5 to 3.5 times in decoding; on an H200 with 8B 1.33 times at batch 1, 0.75 at 8
-- source: Efficient inference and compression (articles in Chinese), part 3; Model-Optimizer, examples/benchmark.md
-- kind: measured
-- metric: the smaller of two logarithms: of the speed-up in decoding, and of the slow-down in prefill, mean over 4-bit formats
-- direction: above
-- threshold: 0
-- experiment: quantization
SELECT
    d.experiment, d.base, avg(least(ln(d.value / d.base_value), -ln(p.value / p.base_value))) AS value,
    mean_error(greatest(
        ratio_error(d.value, d.standard_error, d.base_value, d.base_standard_error) * d.base_value / d.value,
        ratio_error(p.value, p.standard_error, p.base_value, p.base_standard_error) * p.base_value / p.value
    )) AS error, count(*) AS n,
    CASE WHEN bool_or('noisy' IN (d.status, d.base_status, p.status, p.base_status)) THEN 'a timing was noisy' END AS reason,
    format('decoding {:.2f} times, prefill {:.2f}, on {}', avg(d.value / d.base_value), avg(p.value / p.base_value), any_value(d.device)) AS detail
FROM compared AS d
JOIN compared AS p ON p.experiment = d.experiment AND p.variant = d.variant AND p.metric = 'prefill_tok_s'
WHERE d.metric = 'decode_tok_s' AND d.kinds = 'quantize' AND d.bits = 4 AND d.inputs_format IS NULL AND least(d.value, d.base_value, p.value, p.base_value) > 0
GROUP BY d.experiment, d.base;
