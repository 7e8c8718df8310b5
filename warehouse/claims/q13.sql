-- id: q13
-- statement: Massive activations stand at a few tokens only.
-- published: a few tokens, thousands large
-- source: Sun et al. 2024, arXiv:2402.17762
-- kind: measured
-- metric: massive activations a token and block
-- direction: at_most
-- threshold: 0.01
-- experiment: outliers
-- note: Few is read as one in a hundred. That channel outliers come from the norms' gains and grow with size needs larger models.
SELECT
    s.experiment, s.base, sum(s.value) / sum(s.n) AS value, sqrt(sum(s.value)) / sum(s.n) AS error, sum(s.n) AS n,
    CASE WHEN sum(s.value) = 0 THEN 'no activation was massive' END AS reason, format('{:g} in {} blocks', sum(s.value), count(*)) AS detail
FROM by_slice AS s JOIN made_of AS m ON m.experiment = s.experiment AND m.variant = s.variant
WHERE s.metric = 'massive_activations' AND s.slice_kind = 'layer' AND s.status = 'ok' AND m.kinds = '' AND s.n > 0
GROUP BY s.experiment, s.base;
