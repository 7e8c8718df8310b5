-- id: q16
-- statement: Calibrated on English prose, a quantized model loses more in other languages.
-- published: qualitative
-- source: Efficient inference and compression (articles in Chinese), part 3
-- kind: measured
-- metric: KL of the other languages over that of English, of calibrated rounding over the same of rounding that sees no text
-- direction: above
-- threshold: 1
-- experiment: degradation
-- note: Of languages; code is not a language of that text.
WITH spoken AS (
    SELECT
        m.experiment, m.base, m.variant, m.quantize_method, m.format, m.group_size, m.is_symmetric, s.protocol_digest,
        avg(s.value) FILTER (s.slice <> 'en') AS others, avg(s.standard_error) FILTER (s.slice <> 'en') AS others_error,
        max(s.value) FILTER (s.slice = 'en') AS english, max(s.standard_error) FILTER (s.slice = 'en') AS english_error, count(*) AS n
    FROM by_slice AS s JOIN made_of AS m ON m.experiment = s.experiment AND m.variant = s.variant
    WHERE s.metric = 'kl_mean_nats' AND s.slice_kind = 'language' AND s.status = 'ok' AND m.kinds = 'quantize' AND m.inputs_format IS NULL
    GROUP BY ALL HAVING english > 0 AND others > 0
), ratio AS (
    SELECT *, others / english AS ratio, ratio_error(others, others_error, english, english_error) AS error FROM spoken
)
SELECT
    g.experiment, g.base, avg(g.ratio / r.ratio) AS value, mean_error(ratio_error(g.ratio, g.error, r.ratio, r.error)) AS error, count(*) AS n,
    string_agg(format('{} {:.2f}, {} {:.2f}', g.variant, g.ratio, r.variant, r.ratio), '; ' ORDER BY g.variant, r.variant) AS detail
FROM ratio AS g
JOIN ratio AS r
    ON r.experiment = g.experiment AND r.protocol_digest = g.protocol_digest AND r.format = g.format AND r.group_size = g.group_size
    AND r.quantize_method = 'rtn'
WHERE g.quantize_method = 'gptq'
GROUP BY g.experiment, g.base;
