-- id: d10
-- statement: Verifying N nodes for each of B texts is nearly free while B · N stays below the ridge: 60 nodes at a ridge of 295 allow 4 texts, and 8 times 64 is past it.
-- published: 4 texts; 512 nodes
-- source: Efficient inference and compression (articles in Chinese), part 2; Williams et al. 2009, doi:10.1145/1498765.1498785
-- kind: exact
-- metric: published numbers that come out within their rounding, of 3
-- direction: at_least
-- threshold: 3
-- experiment: arithmetic
SELECT
    count(*) FILTER (abs(ours - published) <= rounding) AS value, 0 AS error, count(*) AS n,
    string_agg(beside_published(name, ours, published), '; ' ORDER BY name) AS detail
FROM (VALUES
    ('texts of 60 nodes', floor(295 / 60.0), 4, 0), ('nodes of 8 texts of 64', 8 * 64, 512, 0),
    ('these past the ridge, 1 is yes', CAST(8 * 64 > 295 AS INTEGER), 1, 0)
) AS number (name, ours, published, rounding);
