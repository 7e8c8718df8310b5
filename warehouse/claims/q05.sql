-- id: q05
-- statement: The squared error of a layer's output is tr(E H Eᵀ), of the error E of its weights and the second moment H of its inputs.
-- published: identity
-- source: Frantar et al. 2022, arXiv:2210.17323
-- kind: exact
-- metric: relative deviation of the two sides, on 5 inputs of 4 channels and 3 outputs
-- direction: at_most
-- threshold: 0.000001
-- experiment: arithmetic
WITH e AS (SELECT i, j, sin(3 * i + j) AS value FROM range(3) AS rows (i), range(4) AS columns (j)),
x AS (SELECT t, j, cos(2 * t + 5 * j) AS value FROM range(5) AS tokens (t), range(4) AS columns (j)),
output AS (SELECT sum(e.value * x.value) AS value FROM e JOIN x ON x.j = e.j GROUP BY e.i, x.t),
h AS (SELECT a.j, b.j AS k, sum(a.value * b.value) AS value FROM x AS a JOIN x AS b ON b.t = a.t GROUP BY a.j, b.j),
trace AS (SELECT sum(a.value * h.value * b.value) AS value FROM e AS a JOIN h ON h.j = a.j JOIN e AS b ON b.i = a.i AND b.j = h.k)
SELECT round(abs((SELECT sum(value ** 2) FROM output) / (SELECT value FROM trace) - 1), 12) AS value, 0 AS error, 15 AS n;
