-- id: s03
-- statement: A hundred thousand tokens of probability 10⁻⁶ hold a tenth of the mass together, of 2 · 10⁻⁶ a fifth.
-- published: 0.1 and 0.2
-- source: Efficient inference and compression (articles in Chinese), part 1
-- kind: exact
-- metric: published numbers that come out within their rounding, of 2
-- direction: at_least
-- threshold: 2
-- experiment: arithmetic
SELECT
    count(*) FILTER (abs(ours - published) <= rounding) AS value, 0 AS error, count(*) AS n,
    string_agg(beside_published(name, ours, published), '; ' ORDER BY name) AS detail
FROM (VALUES ('of 1e-6', 1e5 * 1e-6, 0.1, 0.05), ('of 2e-6', 1e5 * 2e-6, 0.2, 0.05)) AS number (name, ours, published, rounding);
