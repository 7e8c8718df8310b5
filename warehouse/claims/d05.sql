-- id: d05
-- statement: Acceptance is highest in greedy decoding and falls as the temperature rises.
-- published: qualitative
-- source: Leviathan et al. 2022, arXiv:2211.17192; Li et al. 2024, arXiv:2401.15077
-- kind: measured
-- metric: greedy acceptance less that at the highest temperature, the protocol otherwise the same, mean over variants whose draft is a model
-- direction: above
-- threshold: 0
-- experiment: speculation
WITH asked AS (
    SELECT
        s.experiment, s.base, s.variant, TRY_CAST(p.spec_json ->> '$.sampling.temperature' AS DOUBLE) AS temperature,
        CAST(json_merge_patch(p.spec_json, '{"sampling": {"temperature": null}}') AS VARCHAR) AS rest, s.value, s.standard_error, s.n
    FROM by_slice AS s
    JOIN made_of AS m ON m.experiment = s.experiment AND m.variant = s.variant
    JOIN protocol AS p ON p.protocol_digest = s.protocol_digest AND json_valid(p.spec_json)
    WHERE s.metric = 'acceptance_when_reached' AND s.slice_kind = 'all' AND s.status = 'ok' AND m.draft_method = 'variant'
), ends AS (
    SELECT
        experiment, base, variant, rest, arg_min(value, temperature) AS cold, arg_max(value, temperature) AS hot, max(temperature) AS temperature,
        difference_error(arg_min(standard_error, temperature), arg_max(standard_error, temperature)) AS error, sum(n) AS n
    FROM asked GROUP BY experiment, base, variant, rest HAVING min(temperature) = 0 AND max(temperature) > 0
)
SELECT
    experiment, base, avg(cold - hot) AS value, mean_error(error) AS error, sum(n) AS n,
    format('greedy {:.3f}, at {:g} {:.3f}, {} variants', avg(cold), max(temperature), avg(hot), count(DISTINCT variant)) AS detail
FROM ends GROUP BY experiment, base;
