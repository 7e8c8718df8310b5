-- id: d08
-- statement: Proposing what followed the same words before pays two to three times where text is copied, and almost nothing on free text.
-- published: 2 to 3 times on copying, about 1 on free text
-- source: Saxena 2023, prompt lookup decoding; Efficient inference and compression (articles in Chinese), part 2
-- kind: measured
-- metric: speed-up on copying over that on free text, of an n-gram draft on the unchanged base, the best number of proposals
-- direction: at_least
-- threshold: 2
-- experiment: speculation
-- note: One ratio says both halves: the published 2 over the published 1.
WITH timed AS (
    SELECT
        m.experiment, m.base, m.variant, p.spec_json ->> '$.prompt' AS prompt, s.value, s.standard_error, s.status, s.n
    FROM by_slice AS s
    JOIN made_of AS m ON m.experiment = s.experiment AND m.variant = s.variant
    JOIN protocol AS p ON p.protocol_digest = s.protocol_digest AND json_valid(p.spec_json)
    WHERE s.metric = 'measured_speedup' AND s.slice_kind = 'all' AND s.value > 0 AND m.kinds = 'draft' AND m.draft_method = 'ngram'
)
SELECT
    a.experiment, a.base, a.value / b.value AS value, ratio_error(a.value, a.standard_error, b.value, b.standard_error) AS error, a.n,
    CASE WHEN 'noisy' IN (a.status, b.status) THEN 'a timing was noisy' END AS reason,
    format('{}: {:.2f} times on copying, {:.2f} on free text', a.variant, a.value, b.value) AS detail
FROM timed AS a
JOIN timed AS b ON b.experiment = a.experiment AND b.variant = a.variant AND b.prompt = 'passage'
WHERE a.prompt = 'copy'
QUALIFY row_number() OVER (PARTITION BY a.experiment, a.base ORDER BY a.value DESC, a.variant, b.value) = 1;
