-- id: s01
-- statement: The entropy of a distribution rises with its temperature at the rate Var(z) / T³, the variance of the logits under the distribution itself.
-- published: identity
-- source: Efficient inference and compression (articles in Chinese), part 1; worked out in ops/evaluate/distribution.py
-- kind: exact
-- metric: largest relative deviation of the numeric slope from the law, at four temperatures
-- direction: at_most
-- threshold: 0.000001
-- experiment: arithmetic
-- note: What our models say of it is the metric entropy_law_residual of the suite distribution.
WITH state AS (
    SELECT
        temperature, side,
        ln(sum(exp(z / t))) - sum(z / t * exp(z / t)) / sum(exp(z / t)) AS entropy,
        sum(z ** 2 * exp(z / t)) / sum(exp(z / t)) - (sum(z * exp(z / t)) / sum(exp(z / t))) ** 2 AS variance
    FROM (
        SELECT temperature, side, temperature + side * 0.0001 AS t, 3 * sin(token) AS z
        FROM (VALUES (0.5), (0.7), (1.0), (1.5)) AS temperatures (temperature), (VALUES (-1), (0), (1)) AS sides (side), range(50) AS tokens (token)
    ) AS logit
    GROUP BY temperature, side
), slope AS (
    SELECT
        (max(entropy) FILTER (side = 1) - max(entropy) FILTER (side = -1)) / 0.0002 AS numeric,
        max(variance) FILTER (side = 0) / any_value(temperature) ** 3 AS law
    FROM state GROUP BY temperature
)
SELECT max(abs(numeric / law - 1)) AS value, 0 AS error, count(*) AS n FROM slope;
