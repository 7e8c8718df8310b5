-- id: s11
-- statement: Masking illegal tokens step by step does not give the model's own distribution over the legal texts.
-- published: qualitative
-- source: Park et al. 2024, arXiv:2405.21047
-- kind: measured
-- metric: total variation between masked sampling and the model's distribution given that the text is legal, mean over prompts
-- direction: above
-- threshold: 0
-- experiment: protocols
SELECT
    experiment, base, value, standard_error AS error, n, CASE WHEN status <> 'ok' THEN 'too few draws carry the weight of a prompt' END AS reason
FROM compared WHERE metric = 'constrained_tv' AND kinds = '';
