-- id: k05
-- statement: The first token takes 30 to 50 % of the attention of many heads.
-- published: 30 to 50 %
-- source: Xiao et al. 2023, arXiv:2309.17453
-- kind: measured
-- metric: share of attention on the first token, the median head
-- direction: at_least
-- threshold: 0.3
-- experiment: heads
-- note: Many is read as half of the heads. What evicting it does is not measured yet.
WITH ranked AS (
    SELECT s.experiment, s.base, list(s.value ORDER BY s.value) AS share, count(*) AS n, count(*) FILTER (s.value >= 0.3) AS many
    FROM by_slice AS s JOIN made_of AS m ON m.experiment = s.experiment AND m.variant = s.variant
    WHERE s.metric = 'sink' AND s.slice_kind = 'head' AND s.value IS NOT NULL AND m.kinds = ''
    GROUP BY s.experiment, s.base
)
SELECT  -- the interval of a median: the values 0.98 √n ranks below and above it
    experiment, base, list_median(share) AS value,
    (share[least(n, CAST(ceil(n / 2 + 1 + 0.98 * sqrt(n)) AS BIGINT))] - share[greatest(1, CAST(floor(n / 2 - 0.98 * sqrt(n)) AS BIGINT))]) / 3.92 AS error,
    n, format('{} heads at 0.3 or more', many) AS detail
FROM ranked;
