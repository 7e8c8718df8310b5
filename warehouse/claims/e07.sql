-- id: e07
-- statement: Total variation is never more than √(KL / 2).
-- published: identity
-- source: Pinsker; Canonne 2022, arXiv:2202.07198
-- kind: exact
-- metric: largest excess of total variation over √(KL / 2); measured: over every mean of a text or of a part of it
-- direction: at_most
-- threshold: 0
-- experiment: quantization
-- note: It holds for means too, since the root is concave. A millionth of a nat is added to each measured KL for float32 logits.
SELECT 'arithmetic' AS experiment, max(abs(p - q) - sqrt(greatest(0, p * ln(p / q) + (1 - p) * ln((1 - p) / (1 - q))) / 2)) AS value, 0 AS error, count(*) AS n, 'pairs of coins' AS detail
FROM (SELECT i / 50.0 - 0.01 AS p FROM range(1, 51) AS heads (i)) AS one, (SELECT i / 50.0 - 0.01 AS q FROM range(1, 51) AS heads (i)) AS other
UNION ALL BY NAME
SELECT
    t.experiment, t.base, max(t.value - sqrt((greatest(k.value, 0) + 1e-6) / 2)) AS value, 0 AS error, count(*) AS n,
    format('largest share of the bound {:.3f}', max(t.value / sqrt((greatest(k.value, 0) + 1e-6) / 2))) AS detail
FROM by_slice AS t
JOIN by_slice AS k
    ON k.experiment = t.experiment AND k.variant = t.variant AND k.protocol_digest = t.protocol_digest AND k.slice_kind = t.slice_kind
    AND k.slice = t.slice AND k.metric = 'kl_mean_nats' AND k.status = 'ok'
WHERE t.metric = 'tv_mean' AND t.status = 'ok'
GROUP BY t.experiment, t.base;
