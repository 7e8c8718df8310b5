-- id: e05
-- statement: A quantized model loses two to three times as much in other languages as in English.
-- published: 2 to 3 times
-- source: Efficient inference and compression (articles in Chinese), part 4; Marchisio et al. 2024, arXiv:2407.03211
-- kind: measured
-- metric: mean KL over the other languages over that of English, mean over 4-bit variants
-- direction: between
-- threshold: 2 3
-- experiment: degradation
WITH spoken AS (
    SELECT
        m.experiment, m.base, m.variant, s.protocol_digest, avg(s.value) FILTER (s.slice <> 'en') AS others,
        avg(s.standard_error) FILTER (s.slice <> 'en') AS others_error, max(s.value) FILTER (s.slice = 'en') AS english,
        max(s.standard_error) FILTER (s.slice = 'en') AS english_error, count(*) - 1 AS languages
    FROM by_slice AS s JOIN made_of AS m ON m.experiment = s.experiment AND m.variant = s.variant
    WHERE s.metric = 'kl_mean_nats' AND s.slice_kind = 'language' AND s.status = 'ok' AND m.kinds = 'quantize' AND m.bits = 4
    GROUP BY ALL HAVING english > 0 AND others > 0
)
SELECT
    experiment, base, avg(others / english) AS value, mean_error(ratio_error(others, others_error, english, english_error)) AS error, count(*) AS n,
    format('{} other languages; from {:.2f} to {:.2f}', max(languages), min(others / english), max(others / english)) AS detail
FROM spoken GROUP BY experiment, base;
