-- id: d01
-- statement: A proposed token is accepted with chance Σ min(p, q), one minus the total variation of draft and target.
-- published: identity
-- source: Leviathan et al. 2022, §3, arXiv:2211.17192
-- kind: exact
-- metric: acceptance less what the distributions say of it; measured: over all proposals of sampled protocols
-- direction: between
-- threshold: -0.05 0.05
-- experiment: speculation
-- note: Equal means: within half of the last digit of the acceptances that the statements quote (0.8).
SELECT 'arithmetic' AS experiment, max(abs(overlap - (1 - tv))) AS value, 0 AS error, count(*) AS n, 'ten pairs of distributions' AS detail FROM (
    SELECT pair, sum(least(p, q)) AS overlap, sum(abs(p - q)) / 2 AS tv FROM (
        SELECT
            pair, exp(3 * sin(token * pair)) / sum(exp(3 * sin(token * pair))) OVER (PARTITION BY pair) AS p,
            exp(3 * cos(token * pair)) / sum(exp(3 * cos(token * pair))) OVER (PARTITION BY pair) AS q
        FROM range(1, 11) AS pairs (pair), range(40) AS tokens (token)
    ) AS chance GROUP BY pair
) AS pairwise
UNION ALL BY NAME
SELECT
    s.experiment, s.base, sum(s.value * s.n) / sum(s.n) AS value, sqrt(sum((s.standard_error * s.n) ** 2)) / sum(s.n) AS error, sum(s.n) AS n,
    format('{} variants, {} protocols', count(DISTINCT s.variant), count(DISTINCT s.protocol_digest)) AS detail
FROM by_slice AS s
JOIN protocol AS p ON p.protocol_digest = s.protocol_digest AND json_valid(p.spec_json)
WHERE s.metric = 'acceptance_minus_expected' AND s.slice_kind = 'all' AND s.status = 'ok' AND s.n > 0
AND TRY_CAST(p.spec_json ->> '$.sampling.temperature' AS DOUBLE) > 0
GROUP BY s.experiment, s.base;
