-- id: q04
-- statement: The best range to clip Gaussian weights to at 4 bits is 2.5 to 3σ.
-- published: 2.5 to 3
-- source: the series, part 3; Banner et al. 2018, arXiv:1810.05723
-- kind: exact
-- metric: the range, in standard deviations, that gives sixteen equal steps the least squared error on a normal distribution
-- direction: between
-- threshold: 2.5 3
-- experiment: arithmetic
-- note: The range is to the outermost edge, sixteen steps apart; the outermost level stands half a step inside.
SELECT arg_min(reach, squared) AS value, 0 AS error, count(*) AS n FROM (
    SELECT
        reach, sum(exp(-(x ** 2) / 2) * (x - least(floor(x / (reach / 8)) + 0.5, 7.5) * reach / 8) ** 2) AS squared
    FROM (SELECT 1.5 + i / 50.0 AS reach FROM range(126) AS reaches (i)) AS tried, (SELECT i / 50.0 + 0.01 AS x FROM range(400) AS places (i)) AS weight
    GROUP BY reach
) AS clipped;
