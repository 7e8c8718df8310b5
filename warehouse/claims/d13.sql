-- id: d13
-- statement: Tokens a round: Medusa 2.5 to 3, EAGLE 3.8 to 4.5, EAGLE-2 4.5 to 5.5, EAGLE-3 5 to 6.5.
-- published: 5 to 6.5 (EAGLE-3)
-- source: Li et al. 2025, arXiv:2503.01840; Spec-Bench measures 2.39, 3.64, 4.43 and 5.71 on a 13B target
-- kind: planned
-- metric: tokens a round of an EAGLE-3 draft with its tree
-- direction: between
-- threshold: 5 6.5
-- experiment: feature-level drafts and trees, which there are not yet
SELECT CAST(NULL AS DOUBLE) AS value WHERE false;
