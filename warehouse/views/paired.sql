-- How do two variants of an experiment differ on the very same items (windows of text, problems, prompts), measured by one protocol on one engine?
-- An item is a problem: the samples of one problem are one item, so standard errors are clustered by problem, and n counts problems.
-- Grain: one row per experiment, ordered pair of variants, protocol and metric. difference: variant − other, mean over the n items that both have, in the
-- metric's unit. low, high: its 95 % interval by Student's t; NULL where n < 2. only_variant, only_other: items on which the one is greater.
-- test, p: McNemar's exact test where every value is 0 or 1, else the paired t-test, both two-sided. p_holm: of all variants of the experiment against this
-- `other`, by Holm's method. detectable: the difference that this test at 5 % would have found in 80 % of samples; NULL: none.
-- above_noise: whether the difference exceeds noise_floor, by batch, dtype or the base itself (not by seed: both variants saw the same items); NULL: no
-- floor was measured. finding: none, where p ≥ 0.05, or the interval has 0, or the difference is not above noise; else better or worse, or differs where
-- neither direction is known to be better. difference_shown: the difference, and 0 where the finding is none.
CREATE OR REPLACE VIEW paired AS
WITH floor AS (
    SELECT artifact_digest, protocol_digest, metric, max(floor) AS floor FROM noise_floor WHERE of = 'item' AND NOT contains(differs, 'seed') GROUP BY ALL
), pair AS (
    SELECT
        a.experiment, a.variant, b.variant AS other, a.artifact_digest, b.artifact_digest AS other_digest, a.suite, a.protocol_digest, a.metric,
        count(*) AS n, avg(a.value - b.value) AS difference, stddev_samp(a.value - b.value) / sqrt(count(*)) AS standard_error,
        CAST(count_if(a.value > b.value) AS BIGINT) AS only_variant, CAST(count_if(a.value < b.value) AS BIGINT) AS only_other,
        bool_and(a.value IN (0, 1) AND b.value IN (0, 1)) AS of_shares
    FROM variant_item AS a
    JOIN variant_item AS b
        ON b.experiment = a.experiment AND b.protocol_digest = a.protocol_digest AND b.metric = a.metric AND b.item = a.item AND b.variant <> a.variant
        AND b.engine IS NOT DISTINCT FROM a.engine AND b.device_digest IS NOT DISTINCT FROM a.device_digest
    GROUP BY ALL
), tested AS (
    SELECT *, CASE
        WHEN n < 2 THEN NULL
        WHEN of_shares THEN mcnemar_exact(only_variant, only_other)
        WHEN standard_error = 0 THEN CASE WHEN difference = 0 THEN 1.0 ELSE 0.0 END
        ELSE t_two_sided(difference / standard_error, n - 1)
    END AS p
    FROM pair
), ranked AS (  -- variants of one artifact are one hypothesis, and the artifact of `other` itself is none
    SELECT *,
        count(DISTINCT artifact_digest) FILTER (p IS NOT NULL) OVER family AS hypotheses, dense_rank() OVER (family ORDER BY p NULLS LAST, artifact_digest) AS place
    FROM tested
    WINDOW family AS (PARTITION BY experiment, protocol_digest, metric, other, artifact_digest = other_digest)
), judged AS (
    SELECT
        r.*, coalesce(greatest(f.floor, g.floor), h.floor) AS noise_floor, difference - t_975(n - 1) * standard_error AS low,
        difference + t_975(n - 1) * standard_error AS high, abs(difference) > coalesce(greatest(f.floor, g.floor), h.floor) AS above_noise,
        least(1.0, max((hypotheses - place + 1) * p) OVER (
            PARTITION BY r.experiment, r.protocol_digest, r.metric, r.other, r.artifact_digest = r.other_digest ORDER BY place
        )) AS p_holm,
        CASE WHEN n < 2 THEN NULL WHEN of_shares THEN detectable_share((only_variant + only_other) / n, n) ELSE detectable_mean(standard_error, n) END AS detectable,
        coalesce(k.better, CASE
            WHEN split_part(r.metric, '/', 1) IN ('score', 'margin_nats', 'acc', 'acc_norm', 'exact_match') THEN 'higher'
            WHEN r.metric = 'nll_mean_nats' THEN 'lower'
        END) AS better
    FROM ranked AS r
    LEFT JOIN floor AS f ON f.artifact_digest = r.artifact_digest AND f.protocol_digest = r.protocol_digest AND f.metric = r.metric
    LEFT JOIN floor AS g ON g.artifact_digest = r.other_digest AND g.protocol_digest = r.protocol_digest AND g.metric = r.metric
    LEFT JOIN (SELECT protocol_digest, metric, max(floor) AS floor FROM floor GROUP BY ALL) AS h
        ON h.protocol_digest = r.protocol_digest AND h.metric = r.metric
    LEFT JOIN metric AS k ON k.metric = split_part(r.metric, '/', 1)
), said AS (
    SELECT *, CASE
        WHEN p IS NULL THEN NULL
        WHEN p >= 0.05 OR (low <= 0 AND high >= 0) OR NOT coalesce(above_noise, true) THEN 'none'
        WHEN better IS NULL THEN 'differs'
        WHEN (better = 'higher') = (difference > 0) THEN 'better'
        ELSE 'worse'
    END AS finding
    FROM judged
)
SELECT
    s.experiment, s.variant, s.other, s.suite, s.metric, p.name AS protocol, n, difference, standard_error, low, high,
    CASE WHEN of_shares THEN 'mcnemar_exact' ELSE 'paired_t' END AS test, only_variant, only_other, s.p, p_holm, detectable, noise_floor, above_noise,
    better, finding, CASE WHEN finding = 'none' THEN 0 ELSE difference END AS difference_shown, s.protocol_digest
FROM said AS s
LEFT JOIN protocol AS p ON p.protocol_digest = s.protocol_digest;
