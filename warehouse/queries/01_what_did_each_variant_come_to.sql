-- What did each variant of quickstart come to, option by option?
SELECT prune, quantize, draft, size_bytes, kl_mean_nats, top1_agreement, decode_tok_s, timing_status
FROM quickstart;
