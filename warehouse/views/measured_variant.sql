-- Which artifact are the facts of a variant about: its divergences about its target (a draft changes no distribution), every other suite about the whole?
-- Grain: one row per experiment, variant and of_target. bases: the digests of the experiment's base, one of which a divergence must be from; NULL: no base.
-- protocols: by which the experiment measures now, facts under any other being of before or of another experiment; NULL: not told, and all count.
CREATE OR REPLACE VIEW measured_variant AS
SELECT
    v.experiment, v.variant, v.base, CASE WHEN of_target THEN v.target_digest ELSE v.artifact_digest END AS digest, of_target,
    CASE WHEN b.variant IS NOT NULL THEN [b.artifact_digest, b.target_digest, b.checkpoint_digest] END AS bases, e.protocols
FROM current_variant AS v
CROSS JOIN (VALUES (false), (true)) AS kind (of_target)
LEFT JOIN base_variant AS b ON b.experiment = v.experiment
LEFT JOIN experiment AS e ON e.experiment = v.experiment;
