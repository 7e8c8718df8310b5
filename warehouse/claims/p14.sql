-- id: p14
-- statement: Pruning and distilling takes forty times fewer tokens than training a model of that size afresh.
-- published: 94 billion against 8 thousand billion tokens
-- source: Muralidharan et al. 2024, arXiv:2407.14679
-- kind: larger
-- metric: tokens that training afresh needs for the same perplexity over those of distillation
-- direction: at_least
-- threshold: 40
-- experiment: larger
SELECT CAST(NULL AS DOUBLE) AS value WHERE false;
