-- id: s04
-- statement: At temperature 0.7 the tail of the vocabulary keeps a small share that is not zero: of a tail of 0.1, about 0.02.
-- published: 0.1 to about 0.02, vocabulary of 128 thousand
-- source: Efficient inference and compression (articles in Chinese), part 1
-- kind: measured
-- metric: tail mass at temperature 0.7 over that at 1, of the tail beyond the k likeliest tokens whose mass at 1 is nearest to 0.1
-- direction: between
-- threshold: 0.15 0.25
-- experiment: sampling
-- note: The bounds are the ratio of the two published numbers with the second one rounded to a hundredth.
WITH tail AS (
    SELECT
        s.experiment, s.base, s.protocol_digest, TRY_CAST(split_part(s.slice, '/', 1) AS DOUBLE) AS temperature, split_part(s.slice, '/', 2) AS k,
        s.value, s.standard_error, s.n
    FROM by_slice AS s JOIN made_of AS m ON m.experiment = s.experiment AND m.variant = s.variant
    WHERE s.metric = 'tail_mass' AND s.slice_kind = 'temperature_k' AND s.status = 'ok' AND m.kinds = ''
)
SELECT
    one.experiment, one.base, low.value / one.value AS value, ratio_error(low.value, low.standard_error, one.value, one.standard_error) AS error, low.n,
    format('beyond the {} likeliest: {:.3g} at 1, {:.3g} at 0.7', one.k, one.value, low.value) AS detail
FROM tail AS one
JOIN tail AS low ON low.experiment = one.experiment AND low.base = one.base AND low.protocol_digest = one.protocol_digest AND low.k = one.k
WHERE one.temperature = 1 AND low.temperature = 0.7 AND one.value > 0
QUALIFY row_number() OVER (PARTITION BY one.experiment, one.base ORDER BY abs(one.value - 0.1), one.protocol_digest) = 1;
