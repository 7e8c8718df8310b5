-- id: s09
-- statement: A frequency penalty of 0.1 takes 5 off the logit of a token that has occurred 50 times.
-- published: 5 logits
-- source: Efficient inference and compression (articles in Chinese), part 1
-- kind: exact
-- metric: what is taken off the logit
-- direction: between
-- threshold: 4.5 5.5
-- experiment: arithmetic
SELECT 0.1 * 50 AS value, 0 AS error, 50 AS n;
