-- id: q02
-- statement: A weight of 15σ makes the step of INT4 2σ; one of 10σ makes it 1.33σ, with rounding noise of 0.38σ, and that of INT8 only 0.08σ.
-- published: 2, 1.33, 0.38 and 0.08
-- source: Efficient inference and compression (articles in Chinese), part 3
-- kind: exact
-- metric: published numbers that come out within their rounding, of 5
-- direction: at_least
-- threshold: 5
-- experiment: arithmetic
SELECT
    count(*) FILTER (abs(ours - published) <= rounding) AS value, 0 AS error, count(*) AS n,
    string_agg(beside_published(name, ours, published), '; ' ORDER BY name) AS detail
FROM (VALUES
    ('step, 15σ, INT4', 2 * 15 / 15.0, 2, 0.5), ('step, 10σ, INT4', 2 * 10 / 15.0, 1.33, 0.005), ('noise, 10σ, INT4', 2 * 10 / 15.0 / sqrt(12), 0.38, 0.005),
    ('noise, 15σ, INT4', 2 * 15 / 15.0 / sqrt(12), 0.58, 0.005), ('step, 10σ, INT8', 2 * 10 / 255.0, 0.08, 0.005)
) AS number (name, ours, published, rounding);
