-- id: s10
-- statement: Penalties on repetition harm code, mathematics and copying, which have to repeat.
-- published: qualitative
-- source: Efficient inference and compression (articles in Chinese), part 1; Keskar et al. 2019, arXiv:1909.05858, for the penalty
-- kind: measured
-- metric: share of right answers with a penalty less that without, the protocol otherwise the same, of the base
-- direction: below
-- threshold: 0
-- experiment: protocols
-- note: Here alone two protocols are compared, since the protocol is what the statement is about.
WITH asked AS (
    SELECT
        s.experiment, s.base, s.metric, s.value, s.standard_error, s.n, p.name,
        TRY_CAST(p.spec_json ->> '$.sampling.repetition_penalty' AS DOUBLE) > 1 OR TRY_CAST(p.spec_json ->> '$.sampling.frequency_penalty' AS DOUBLE) > 0
        OR TRY_CAST(p.spec_json ->> '$.sampling.presence_penalty' AS DOUBLE) > 0 AS penalised,
        CAST(json_merge_patch(p.spec_json, '{"sampling": {"repetition_penalty": null, "frequency_penalty": null, "presence_penalty": null, "count_prompt": null}}') AS VARCHAR) AS rest
    FROM by_slice AS s
    JOIN made_of AS m ON m.experiment = s.experiment AND m.variant = s.variant
    JOIN protocol AS p ON p.protocol_digest = s.protocol_digest AND json_valid(p.spec_json)
    WHERE s.metric IN ('pass_at_1', 'task_score') AND s.slice_kind = 'all' AND s.status = 'ok' AND m.kinds = ''
)
SELECT
    a.experiment, a.base, avg(a.value - b.value) AS value, mean_error(difference_error(a.standard_error, b.standard_error)) AS error, sum(a.n) AS n,
    string_agg(format('{} {:.3f}, {} {:.3f}', a.name, a.value, b.name, b.value), '; ' ORDER BY a.name, b.name) AS detail
FROM asked AS a
JOIN asked AS b ON b.experiment = a.experiment AND b.base = a.base AND b.metric = a.metric AND b.rest = a.rest
WHERE a.penalised AND NOT b.penalised
GROUP BY a.experiment, a.base;
