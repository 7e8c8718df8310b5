-- id: q04
-- statement: The best range to clip Gaussian weights to at 4 bits is 2.5 to 3σ.
-- published: 2.5 to 3
-- source: Efficient inference and compression (articles in Chinese), part 3; Banner et al. 2018, arXiv:1810.05723
-- kind: exact
-- metric: the range, in standard deviations, with the least sum of rounding and clipping error on a normal distribution
-- direction: between
-- threshold: 2.5 3
-- experiment: arithmetic
-- note: Rounding is taken as Δ² / 12 over the whole range, as in the source; rounded really, the best range is 2.7.
SELECT arg_min(reach, squared) AS value, 0 AS error, count(*) AS n FROM (
    SELECT reach, any_value(reach ** 2 / (3 * 4 ** 4)) + 2 * sum(greatest(x - reach, 0) ** 2 * exp(-(x ** 2) / 2) * 0.02) / sqrt(2 * pi()) AS squared
    FROM (SELECT 1.5 + i / 50.0 AS reach FROM range(126) AS reaches (i)) AS tried, (SELECT i / 50.0 + 0.01 AS x FROM range(400) AS places (i)) AS weight
    GROUP BY reach
) AS clipped;
