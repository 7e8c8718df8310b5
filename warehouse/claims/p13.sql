-- id: p13
-- statement: The teacher's forward pass costs 0.6 of the student's training from 15B to 8B, 1.6 in all, and 2.9 from 70B to 8B.
-- published: 0.6, 1.6, 2.9
-- source: Efficient inference and compression (articles in Chinese), parts 6 and 7
-- kind: exact
-- metric: published numbers that come out within their rounding, of 3
-- direction: at_least
-- threshold: 3
-- experiment: arithmetic
SELECT
    count(*) FILTER (abs(ours - published) <= rounding) AS value, 0 AS error, count(*) AS n,
    string_agg(beside_published(name, ours, published), '; ' ORDER BY name) AS detail
FROM (VALUES ('15B to 8B', 2 * 15 / (6 * 8.0), 0.6, 0.05), ('in all', 1 + 2 * 15 / (6 * 8.0), 1.6, 0.05), ('70B to 8B', 2 * 70 / (6 * 8.0), 2.9, 0.05)) AS number (name, ours, published, rounding);
