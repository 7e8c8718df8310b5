-- id: d02
-- statement: A round of γ proposals gives (1 − α^(γ+1)) / (1 − α) tokens on average, and so a speed-up of that over γc + 1.
-- published: 2.53 tokens; 2.4, 2.2 and 1.9 times
-- source: Leviathan et al. 2022, §3, arXiv:2211.17192
-- kind: exact
-- metric: published numbers that come out within their rounding, of 4
-- direction: at_least
-- threshold: 4
-- experiment: arithmetic
SELECT
    count(*) FILTER (abs(ours - published) <= rounding) AS value, 0 AS error, count(*) AS n,
    string_agg(beside_published(name, ours, published), '; ' ORDER BY name) AS detail
FROM (VALUES
    ('tokens at α 0.7, γ 3', (1 - 0.7 ** 4) / 0.3, 2.53, 0.005),
    ('α 0.8, γ 4, c 0.1', (1 - 0.8 ** 5) / 0.2 / 1.4, 2.4, 0.05),
    ('α 0.7, γ 3, c 0.05', (1 - 0.7 ** 4) / 0.3 / 1.15, 2.2, 0.05),
    ('α 0.7, γ 3, c 0.11', (1 - 0.7 ** 4) / 0.3 / 1.33, 1.9, 0.05)
) AS number (name, ours, published, rounding);
