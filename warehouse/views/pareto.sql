-- Which variants does no sibling of the same experiment beat on both bytes and divergence?
-- Grain: one row per experiment and variant on the front. Only divergences with status ok are ranked; equals are all on the front.
-- size_bytes: as stored. kl_mean_nats: per token against the base. decode_tok_s: tokens per second, not ranked.
CREATE OR REPLACE VIEW pareto AS
WITH ranked AS (FROM scorecard WHERE divergence_status = 'ok' AND size_bytes IS NOT NULL AND kl_mean_nats IS NOT NULL)
SELECT experiment, variant, size_bytes, kl_mean_nats, kl_mean_standard_error_nats, decode_tok_s, timing_status
FROM ranked AS mine
WHERE NOT EXISTS (
    FROM ranked AS other
    WHERE other.experiment = mine.experiment AND other.size_bytes <= mine.size_bytes AND other.kl_mean_nats <= mine.kl_mean_nats
    AND (other.size_bytes < mine.size_bytes OR other.kl_mean_nats < mine.kl_mean_nats)
);
