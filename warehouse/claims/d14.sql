-- id: d14
-- statement: A model trained to predict two tokens has its second one accepted in 85 to 90 % of cases, and is about 1.8 times as fast.
-- published: 0.85 to 0.9 (DeepSeek-V3)
-- source: DeepSeek-AI 2024, arXiv:2412.19437
-- kind: larger
-- metric: acceptance of the second token
-- direction: between
-- threshold: 0.85 0.9
-- experiment: larger
SELECT CAST(NULL AS DOUBLE) AS value WHERE false;
