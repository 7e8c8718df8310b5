-- id: q03
-- statement: With scale and zero point a 4-bit weight takes 4.156 bits in groups of 128, 4.625 in groups of 32, 4.08 in groups of 256; MXFP4 takes 4.25, NVFP4 4.5, NF4 with nested scales 4.127.
-- published: 4.156 (3.85 times), 4.625 (3.46 times), 4.08, 4.25, 4.5, 4.127
-- source: Efficient inference and compression (articles in Chinese), parts 3 and 4; Dettmers et al. 2023, arXiv:2305.14314, for the nested scales
-- kind: exact
-- metric: published numbers that come out within their rounding, of 8
-- direction: at_least
-- threshold: 8
-- experiment: arithmetic
SELECT
    count(*) FILTER (abs(ours - published) <= rounding) AS value, 0 AS error, count(*) AS n,
    string_agg(beside_published(name, ours, published), '; ' ORDER BY name) AS detail
FROM (VALUES
    ('INT4 g128', 4 + 20 / 128.0, 4.156, 0.0005), ('INT4 g128, times smaller', 16 / (4 + 20 / 128.0), 3.85, 0.005), ('INT4 g32', 4 + 20 / 32.0, 4.625, 0.0005),
    ('INT4 g32, times smaller', 16 / (4 + 20 / 32.0), 3.46, 0.005), ('INT4 g256', 4 + 20 / 256.0, 4.08, 0.005), ('MXFP4', 4 + 8 / 32.0, 4.25, 0.005),
    ('NVFP4', 4 + 8 / 16.0, 4.5, 0.05), ('NF4 nested', 4 + 8 / 64.0 + 32 / (64.0 * 256), 4.127, 0.0005)
) AS number (name, ours, published, rounding);
