-- id: d07
-- statement: A draft that learnt from its target is accepted more often than one of the same size that learnt from text.
-- published: 10 to 45 % more
-- source: Zhou et al. 2023, DistillSpec, arXiv:2310.08461
-- kind: measured
-- metric: acceptance of a draft that was taught over that of one trained by cross-entropy, less 1, the target, tokens and proposals the same
-- direction: at_least
-- threshold: 0.1
-- experiment: speculation
-- note: Of the same size: they began as the same model, and were rounded alike or not at all. One that learnt from text is a variant of distill with loss: cross_entropy, named as a draft.
WITH trained AS (
    SELECT
        m.experiment, m.base, m.variant, m.but_draft, m.draft_tokens, a.protocol_digest, a.value, a.standard_error, a.n,
        coalesce(t.spec_json ->> '$.distill.loss', t.spec_json ->> '$.loss') AS loss,
        coalesce(t.spec_json ->> '$.distill.tokens', t.spec_json ->> '$.tokens') AS tokens,
        t.spec_json ->> '$.distill.quantize' AS rounded, t.spec_json ->> '$.early_exit' AS blocks, o.parent_digest AS began_as
    FROM made_of AS m
    JOIN current_variant AS v ON v.experiment = m.experiment AND v.variant = m.variant
    JOIN lineage AS l ON l.artifact_digest = v.artifact_digest AND l.role = 'draft'
    JOIN step AS t ON t.artifact_digest = l.parent_digest AND t.kind IN ('distill', 'draft_model') AND json_valid(t.spec_json)
    LEFT JOIN lineage AS o ON o.artifact_digest = t.artifact_digest AND o.role = CASE t.kind WHEN 'distill' THEN 'parent' ELSE 'draft' END
    JOIN by_slice AS a ON a.experiment = m.experiment AND a.variant = m.variant AND a.metric = 'acceptance_when_reached' AND a.slice_kind = 'all'
    WHERE m.draft_method = 'variant' AND a.status = 'ok'
)
SELECT
    a.experiment, a.base, avg(a.value) / nullif(avg(b.value), 0) - 1 AS value,
    ratio_error(avg(a.value), mean_error(a.standard_error), avg(b.value), mean_error(b.standard_error)) AS error, sum(a.n) AS n,
    string_agg(DISTINCT format('{} against {}', a.variant, b.variant), '; ') AS detail
FROM trained AS a
JOIN trained AS b
    ON b.experiment = a.experiment AND b.but_draft = a.but_draft AND b.draft_tokens = a.draft_tokens AND b.protocol_digest = a.protocol_digest
    AND b.tokens = a.tokens AND b.rounded IS NOT DISTINCT FROM a.rounded AND b.blocks IS NOT DISTINCT FROM a.blocks
    AND b.began_as IS NOT DISTINCT FROM a.began_as
WHERE a.loss <> 'cross_entropy' AND b.loss = 'cross_entropy'
GROUP BY a.experiment, a.base;
