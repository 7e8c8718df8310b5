-- By which protocols does an experiment measure a suite now? Facts of the suite under any other are of before it was changed, and in no view.
-- Grain: one row per experiment and suite that it declares; none for an experiment that has told no protocols.
CREATE OR REPLACE VIEW declared_suite AS
SELECT e.experiment, p.suite, list(p.protocol_digest) AS protocols
FROM (SELECT experiment, unnest(protocols) AS protocol_digest FROM experiment) AS e
JOIN protocol AS p ON p.protocol_digest = e.protocol_digest
GROUP BY e.experiment, p.suite;
