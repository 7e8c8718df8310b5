-- id: k04
-- statement: At 2 bits keys need a scale for each channel and values one for each token; with the keys the other way round the model breaks.
-- published: +0.1 perplexity, against several tens (Llama-2-13B, 2 bits)
-- source: Liu et al. 2024, arXiv:2402.02750
-- kind: planned
-- metric: perplexity with keys by token over that with keys by channel, 2 bits
-- direction: above
-- threshold: 2
-- experiment: formats of keys and values below 8 bits, which there are not yet
SELECT CAST(NULL AS DOUBLE) AS value WHERE false;
