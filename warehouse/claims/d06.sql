-- id: d06
-- statement: How often two models agree on the likeliest token is not how often one accepts the other's proposals.
-- published: qualitative
-- source: Efficient inference and compression (articles in Chinese), part 2; Leviathan et al. 2022, arXiv:2211.17192, for the acceptance
-- kind: measured
-- metric: |top-1 agreement − (1 − total variation)|, mean over variants taken as drafts of their base at temperature 1
-- direction: above
-- threshold: 0.05
-- experiment: quantization
-- note: Not the same means: apart by more than half of the last digit of the acceptances that the statements quote (0.8).
WITH pair AS (
    SELECT t.experiment, t.base, t.variant, abs(t.value - (1 - v.value)) AS gap, difference_error(t.standard_error, v.standard_error) AS error
    FROM compared AS t
    JOIN compared AS v ON v.experiment = t.experiment AND v.variant = t.variant AND v.metric = 'tv_mean' AND v.status = 'ok'
    WHERE t.metric = 'top1_agreement' AND t.status = 'ok' AND t.kinds <> '' AND t.draft_method IS NULL
)
SELECT
    experiment, base, avg(gap) AS value, mean_error(error) AS error, count(*) AS n,
    format('largest {:.3f} of {}', max(gap), arg_max(variant, gap)) AS detail
FROM pair GROUP BY experiment, base;
