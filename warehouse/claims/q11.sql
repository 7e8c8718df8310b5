-- id: q11
-- statement: A Hadamard rotation spreads an outlier over all channels: 500 among ones in 1024 channels becomes about 17, 1000 in 4096 too.
-- published: about 17, both
-- source: Efficient inference and compression (articles in Chinese), part 3; Ashkboos et al. 2024, arXiv:2404.00456
-- kind: exact
-- metric: published numbers that come out within their rounding, of 2
-- direction: at_least
-- threshold: 2
-- experiment: arithmetic
-- note: The outlier's share, 500 / √1024, and one standard deviation of what the other channels add. The largest of all channels is more, about 19.
SELECT
    count(*) FILTER (abs(ours - published) <= rounding) AS value, 0 AS error, count(*) AS n,
    string_agg(beside_published(name, ours, published), '; ' ORDER BY name) AS detail
FROM (VALUES
    ('500 in 1024', 500 / sqrt(1024) + sqrt(1023 / 1024.0), 17, 0.5), ('1000 in 4096', 1000 / sqrt(4096) + sqrt(4095 / 4096.0), 17, 0.5)
) AS number (name, ours, published, rounding);
