-- id: s02
-- statement: Temperature only raises the ratio of two probabilities to the power 1 / T; it makes none of them zero.
-- published: identity
-- source: Efficient inference and compression (articles in Chinese), part 1
-- kind: exact
-- metric: largest relative deviation from the law over pairs of tokens and temperatures; 1 where a probability became zero
-- direction: at_most
-- threshold: 0.000001
-- experiment: arithmetic
WITH chance AS (
    SELECT temperature, token, exp(z / temperature) / sum(exp(z / temperature)) OVER (PARTITION BY temperature) AS p
    FROM (VALUES (0.3), (0.7), (1.0), (2.0)) AS temperatures (temperature), (SELECT i AS token, 5 * sin(i) AS z FROM range(20) AS tokens (i)) AS logit
), pair AS (
    SELECT a.temperature, a.p / b.p AS ratio, (c.p / d.p) ** (1 / a.temperature) AS law, a.p
    FROM chance AS a
    JOIN chance AS b ON b.temperature = a.temperature AND b.token = 0
    JOIN chance AS c ON c.temperature = 1 AND c.token = a.token
    JOIN chance AS d ON d.temperature = 1 AND d.token = 0
)
SELECT max(CASE WHEN p = 0 THEN 1 ELSE abs(ratio / law - 1) END) AS value, 0 AS error, count(*) AS n FROM pair;
