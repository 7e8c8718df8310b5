-- id: d03
-- statement: Speculation leaves what the target says unchanged: greedy, the same tokens.
-- published: exact
-- source: Leviathan et al. 2022, appendix A.1, arXiv:2211.17192
-- kind: measured
-- metric: tokens that differ from plain greedy decoding, near ties of rounding left out
-- direction: at_most
-- threshold: 0
-- experiment: speculation
-- note: Of sampled decoding it is d01 that says so, and tests of the sampler.
SELECT
    experiment, base, sum(value) AS value, 0 AS error, sum(n) AS n,
    format('{} variants, {} protocols', count(DISTINCT variant), count(DISTINCT protocol_digest)) AS detail
FROM by_slice WHERE metric = 'greedy_mismatches' AND slice_kind = 'all' AND status = 'ok'
GROUP BY experiment, base;
