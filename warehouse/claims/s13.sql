-- id: s13
-- statement: Beam search on open text gives short, flat and repetitive text.
-- published: qualitative
-- source: Holtzman et al. 2019, arXiv:1904.09751
-- kind: planned
-- metric: distinct n-grams of a beam's text over those of a sample's
-- direction: below
-- threshold: 1
-- experiment: a suite that measures open text, which there is not yet
SELECT CAST(NULL AS DOUBLE) AS value WHERE false;
