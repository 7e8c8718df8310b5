-- id: c02
-- statement: An H100 computes 295 operations in the time of reading a byte, an H200 206.
-- published: 295 and 206 operations a byte
-- source: Efficient inference and compression (articles in Chinese), part 2; data sheets: 989 · 10¹² operations a second in bf16, 3.35 and 4.8 · 10¹² bytes; other sources have up to 412
-- kind: exact
-- metric: published numbers that come out within their rounding, of 2
-- direction: at_least
-- threshold: 2
-- experiment: arithmetic
-- note: Of the data sheets' rates, which no program reaches.
SELECT
    count(*) FILTER (abs(ours - published) <= rounding) AS value, 0 AS error, count(*) AS n,
    string_agg(beside_published(name, ours, published), '; ' ORDER BY name) AS detail
FROM (VALUES ('H100', 989 / 3.35, 295, 0.5), ('H200', 989 / 4.8, 206, 0.5)) AS number (name, ours, published, rounding);
