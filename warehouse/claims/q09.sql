-- id: q09
-- statement: The exponent that AWQ finds lies between 0.3 and 0.7 in most layers.
-- published: 0.3 to 0.7 in most layers
-- source: Efficient inference and compression (articles in Chinese), part 3; Lin et al. 2023, arXiv:2306.00978
-- kind: planned
-- metric: share of layers whose exponent lies between 0.3 and 0.7
-- direction: above
-- threshold: 0.5
-- experiment: quantization, once the exponents are facts: the step keeps them with its artifact
SELECT CAST(NULL AS DOUBLE) AS value WHERE false;
