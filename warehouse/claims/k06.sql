-- id: k06
-- statement: An eviction of keys and values that passes summaries fails needles.
-- published: no loss of summaries at a fifth kept, lost needles at four fifths
-- source: Efficient inference and compression (articles in Chinese), part 5; Zhang et al. 2023, arXiv:2306.14048
-- kind: planned
-- metric: relative loss of needles less that of summaries, at a fifth kept
-- direction: above
-- threshold: 0
-- experiment: eviction of keys and values, which is not built yet
SELECT CAST(NULL AS DOUBLE) AS value WHERE false;
