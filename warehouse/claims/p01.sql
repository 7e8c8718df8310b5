-- id: p01
-- statement: A block changes the direction of its input little in the middle and later layers: their cosine is 0.85 to 0.95, 0.3 to 0.6 in the first.
-- published: 0.85 to 0.95
-- source: Men et al. 2024, ShortGPT, arXiv:2403.03853
-- kind: planned
-- metric: mean cosine of input and output over the middle and later blocks
-- direction: between
-- threshold: 0.85 0.95
-- experiment: depth_pruning, once the cosines are facts: the step keeps its scores with its artifact
SELECT CAST(NULL AS DOUBLE) AS value WHERE false;
