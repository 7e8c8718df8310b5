-- Which artifacts took the longest to build, how large are they, and how many variants share each?
WITH RECURSIVE needed AS (
    SELECT DISTINCT experiment, variant, artifact_digest FROM current_variant
    UNION
    SELECT n.experiment, n.variant, l.parent_digest FROM needed AS n JOIN lineage AS l ON l.artifact_digest = n.artifact_digest
)
SELECT s.kind, s.build_seconds, s.size_bytes, count(DISTINCT (n.experiment, n.variant)) AS variants, s.artifact_digest
FROM step AS s
JOIN needed AS n ON n.artifact_digest = s.artifact_digest
GROUP BY ALL
ORDER BY s.build_seconds DESC, s.artifact_digest
LIMIT 20;
