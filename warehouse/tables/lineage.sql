-- What an artifact was made from.
-- Grain: one row per artifact, parent and role.
CREATE TABLE lineage (
    artifact_digest VARCHAR NOT NULL,
    parent_digest VARCHAR NOT NULL,
    role VARCHAR NOT NULL,
    PRIMARY KEY (artifact_digest, parent_digest, role)
);
COMMENT ON TABLE lineage IS 'What an artifact was made from. Grain: one row per artifact, parent and role.';
COMMENT ON COLUMN lineage.artifact_digest IS 'the artifact';
COMMENT ON COLUMN lineage.parent_digest IS 'the artifact that it was made from';
COMMENT ON COLUMN lineage.role IS 'parent, draft, teacher or base';
