-- id: s07
-- statement: The unbiased estimate of pass@k from n samples of which c are right is 1 − C(n − c, k) / C(n, k); of 10 samples with 2 right, pass@5 is 0.78.
-- published: 0.78
-- source: Chen et al. 2021, arXiv:2107.03374
-- kind: exact
-- metric: pass@5 of 10 samples with 2 right
-- direction: between
-- threshold: 0.775 0.785
-- experiment: arithmetic
SELECT
    1 - (factorial(8) / (factorial(5) * factorial(3))) / (factorial(10) / (factorial(5) * factorial(5))) AS value, 0 AS error, 10 AS n;
