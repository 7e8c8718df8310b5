-- id: q17
-- statement: A 70B model takes 141 GB in bf16, 70.6 in FP8, and 39.8 in 4 bits with groups of 128 and embedding and head as they were.
-- published: 141, 70.6 and 39.8 GB
-- source: Efficient inference and compression (articles in Chinese), part 3
-- kind: exact
-- metric: published numbers that come out within their rounding, of 3
-- direction: at_least
-- threshold: 3
-- experiment: arithmetic
-- note: Of Llama-3.1-70B: 70,553,706,496 weights, of which 2 · 128,256 · 8,192 are embedding and head. GB of 10⁹ bytes.
SELECT
    count(*) FILTER (abs(ours - published) <= rounding) AS value, 0 AS error, count(*) AS n,
    string_agg(beside_published(name, ours, published), '; ' ORDER BY name) AS detail
FROM (VALUES
    ('bf16', 70.553706496 * 2, 141, 0.5), ('FP8', 70.553706496, 70.6, 0.05),
    ('W4 g128', (70.553706496 - 2.101346304) * (4 + 20 / 128.0) / 8 + 2.101346304 * 2, 39.8, 0.05)
) AS number (name, ours, published, rounding);
