-- How do two variants of an experiment differ on the very same items (windows of text, prompts), measured by one protocol?
-- Grain: one row per experiment, ordered pair of variants, protocol and metric. difference: variant − other, mean over the n items that both have, in the
-- metric's unit. low, high: 95 % interval, difference ± 1.96 standard errors of the paired differences; NULL where n < 2.
CREATE OR REPLACE VIEW paired AS
WITH mine AS (
    SELECT v.experiment, v.variant, i.protocol_digest, i.suite, i.metric, i.item, i.value
    FROM item AS i
    JOIN current_variant AS v ON i.artifact_digest = CASE WHEN i.suite = 'divergence' THEN v.target_digest ELSE v.artifact_digest END
    WHERE i.value IS NOT NULL
    QUALIFY row_number() OVER (PARTITION BY v.experiment, v.variant, i.protocol_digest, i.metric, i.item ORDER BY i.run DESC) = 1
), pair AS (
    SELECT
        a.experiment, a.variant, b.variant AS other, a.suite, a.protocol_digest, a.metric,
        count(*) AS n, avg(a.value - b.value) AS difference, stddev_samp(a.value - b.value) / sqrt(count(*)) AS standard_error
    FROM mine AS a
    JOIN mine AS b USING (experiment, protocol_digest, metric, item)
    WHERE a.variant <> b.variant
    GROUP BY ALL
)
SELECT
    pair.* EXCLUDE (protocol_digest, n, difference, standard_error), p.name AS protocol, n, difference, standard_error,
    difference - 1.96 * standard_error AS low, difference + 1.96 * standard_error AS high
FROM pair
LEFT JOIN protocol AS p ON p.protocol_digest = pair.protocol_digest;
