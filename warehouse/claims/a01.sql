-- id: a01
-- statement: Written as w plus a constant, Q(w) − w, the rounded weight has the value Q(w) and the slope 1.
-- published: identity
-- source: Bengio et al. 2013, arXiv:1308.3432
-- kind: exact
-- metric: largest deviation of the value from Q(w) and of the numeric slope from 1, on 100 weights
-- direction: at_most
-- threshold: 0.000001
-- experiment: arithmetic
SELECT
    max(greatest(abs(w + stopped - rounded), abs(((w + 0.001 + stopped) - (w - 0.001 + stopped)) / 0.002 - 1))) AS value, 0 AS error, count(*) AS n
FROM (SELECT w, round(w * 7) / 7 AS rounded, round(w * 7) / 7 - w AS stopped FROM (SELECT sin(i) AS w FROM range(100) AS weights (i)) AS weight) AS straight;
