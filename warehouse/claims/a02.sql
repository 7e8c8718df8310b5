-- id: a02
-- statement: In training with rounding, learning from the unrounded self beats cross-entropy and halves what is lost.
-- published: half; torchao reports about a third
-- source: Efficient inference and compression (articles in Chinese), part 4; torchao, quantization-aware training
-- kind: planned
-- metric: loss of perplexity after training toward the unrounded self over that after cross-entropy
-- direction: below
-- threshold: 1
-- experiment: quantization-aware training, which is not built yet
SELECT CAST(NULL AS DOUBLE) AS value WHERE false;
