-- id: p05
-- statement: Removing the first or the last layer is a disaster, removing one in between is not.
-- published: qualitative
-- source: Efficient inference and compression (articles in Chinese), part 6; Men et al. 2024, arXiv:2403.03853
-- kind: planned
-- metric: mean KL without the first or the last layer over that without a middle one, the smaller
-- direction: above
-- threshold: 2
-- experiment: a step that names the layer that it removes, which there is not yet
SELECT CAST(NULL AS DOUBLE) AS value WHERE false;
