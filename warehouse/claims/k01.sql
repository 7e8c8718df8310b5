-- id: k01
-- statement: A token of context takes 320 KB in a 70B model with 8 KV heads and 128 KB in an 8B one; 128 thousand of them 40 and 16 GB, half in FP8, 12.5 and 5 in KIVI's INT4, 3.1 after an eviction to a quarter, and 8.8 with latent attention.
-- published: 320, 128 KB; 40, 16, 20, 8, 12.5, 5, 3.1, 8.8 GB; 3.2 times
-- source: Efficient inference and compression (articles in Chinese), part 5; Liu et al. 2024, arXiv:2402.02750; DeepSeek-AI 2024, arXiv:2405.04434
-- kind: exact
-- metric: published numbers that come out within their rounding, of 11
-- direction: at_least
-- threshold: 11
-- experiment: arithmetic
-- note: Ten of them do. Latent attention of 61 layers of 512 + 64 numbers takes 68.6 KiB a token and 8.6 GiB in all; 8.8 comes of rounding it to 70 first.
SELECT
    count(*) FILTER (abs(ours - published) <= rounding) AS value, 0 AS error, count(*) AS n,
    string_agg(beside_published(name, ours, published), '; ' ORDER BY name) AS detail
FROM (VALUES
    ('70B, KiB a token', 2 * 80 * 8 * 128 * 2 / 1024.0, 320, 0.5), ('8B, KiB a token', 2 * 32 * 8 * 128 * 2 / 1024.0, 128, 0.5),
    ('70B, GiB', 320 * 131072 / 1048576.0, 40, 0.5), ('8B, GiB', 128 * 131072 / 1048576.0, 16, 0.5),
    ('70B FP8, GiB', 160 * 131072 / 1048576.0, 20, 0.5), ('8B FP8, GiB', 64 * 131072 / 1048576.0, 8, 0.5),
    ('KIVI, times smaller', 16 / (4 + 32 / 32.0), 3.2, 0.05), ('70B KIVI, GiB', 40 * 5 / 16.0, 12.5, 0.05), ('8B KIVI, GiB', 16 * 5 / 16.0, 5, 0.5),
    ('70B KIVI and a quarter, GiB', 40 * 5 / 16.0 / 4, 3.1, 0.05), ('latent attention, GiB', 61 * (512 + 64) * 2 / 1073741824.0 * 131072, 8.8, 0.05)
) AS number (name, ours, published, rounding);
