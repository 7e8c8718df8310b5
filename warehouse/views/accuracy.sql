-- Between which bounds does each share lie: answers that are right, tokens that agree, samples that were cut off?
-- Grain: as `by_slice`, of shares of samples. low, high: Wilson's 95 % interval, of the number of independent samples that standard_error comes to where it
-- is clustered by problem or window, and of n where there is none. So it has a width at 0 and at 1 too.
CREATE OR REPLACE VIEW accuracy AS
WITH share AS (
    SELECT *, CASE
        WHEN value > 0 AND value < 1 AND standard_error > 0 THEN value * (1 - value) / standard_error ** 2 + 1 ELSE n
    END AS samples
    FROM by_slice
    WHERE status = 'ok' AND n > 0 AND value BETWEEN 0 AND 1 AND (
        regexp_matches(metric, '(^|_)(accuracy|agreement|pass_at_1|pass_at_k|majority_at_k|acceptance_rate|acceptance_when_reached|task_score)($|_)')
        OR (metric LIKE '%\_share' ESCAPE '\' AND suite IN ('arithmetic', 'generation', 'needle', 'constrained') AND metric <> 'effective_sample_share')
        OR (metric = 'harness_score' AND regexp_matches(slice, '/(acc|acc_norm|exact_match|prompt_level_strict_acc|prompt_level_loose_acc)(/|$)'))
    )
)
SELECT
    experiment, variant, suite, protocol, metric, slice_kind, slice, seed, value, wilson_low(value, samples) AS low, wilson_high(value, samples) AS high,
    n, samples, standard_error, artifact_digest, protocol_digest
FROM share;
