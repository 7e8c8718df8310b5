-- Is the loss of a combination the sum of its parts'? A part is the variant that takes one of its options and the base's on every other axis.
-- Grain: one row per experiment and variant that leaves the base on two or more axes. Sums are NULL where a part was not measured.
-- kl_*: nats per token; kl_excess_nats = combination − sum, above 0 where the parts make each other worse; its standard error adds those of
-- all in squares. log_speedup: natural logarithm of decode_tok_s ÷ the base's; its excess is below 0 where the parts' gains do not multiply.
CREATE OR REPLACE VIEW interaction AS
WITH base_option AS (
    SELECT a.experiment, a.axis, a.option FROM variant_axis AS a JOIN base_variant AS b ON b.experiment = a.experiment AND b.variant = a.variant
), changed AS (
    SELECT a.experiment, a.variant, a.axis, a.option
    FROM variant_axis AS a
    JOIN current_variant AS v ON v.experiment = a.experiment AND v.variant = a.variant
    LEFT JOIN base_option AS o ON o.experiment = a.experiment AND o.axis = a.axis
    WHERE a.option IS DISTINCT FROM o.option AND a.experiment IN (SELECT experiment FROM base_option)
), single AS (
    SELECT experiment, any_value(axis) AS axis, any_value(option) AS option, variant FROM changed GROUP BY experiment, variant HAVING count(*) = 1
), card AS (
    SELECT
        s.experiment, s.variant, s.kl_mean_nats, s.kl_mean_standard_error_nats, ln(s.decode_tok_s / nullif(b.decode_tok_s, 0)) AS log_speedup,
        CASE WHEN s.timing_status = 'ok' AND b.timing_status <> 'ok' THEN b.timing_status ELSE s.timing_status END AS timing_status
    FROM scorecard AS s
    JOIN base_variant AS v ON v.experiment = s.experiment
    JOIN scorecard AS b ON b.experiment = v.experiment AND b.variant = v.variant
), part AS (
    SELECT
        c.experiment, c.variant, string_agg(c.axis || '=' || c.option, ' + ' ORDER BY c.axis) AS parts,
        CAST(count(*) - count(s.variant) AS INTEGER) AS parts_missing,
        CASE WHEN count(p.kl_mean_nats) = count(*) THEN sum(p.kl_mean_nats) END AS kl_sum_of_parts_nats,
        CASE WHEN count(p.kl_mean_standard_error_nats) = count(*) THEN sum(p.kl_mean_standard_error_nats ** 2) END AS kl_variance,
        CASE WHEN count(p.log_speedup) = count(*) THEN sum(p.log_speedup) END AS log_speedup_of_parts,
        bool_and(p.timing_status = 'ok') AS all_ok
    FROM changed AS c
    LEFT JOIN single AS s ON s.experiment = c.experiment AND s.axis = c.axis AND s.option = c.option
    LEFT JOIN card AS p ON p.experiment = s.experiment AND p.variant = s.variant
    GROUP BY c.experiment, c.variant
    HAVING count(*) >= 2
)
SELECT
    part.experiment, part.variant, part.parts, whole.kl_mean_nats, part.kl_sum_of_parts_nats,
    whole.kl_mean_nats - part.kl_sum_of_parts_nats AS kl_excess_nats,
    sqrt(whole.kl_mean_standard_error_nats ** 2 + part.kl_variance) AS kl_excess_standard_error_nats,
    whole.log_speedup, part.log_speedup_of_parts, whole.log_speedup - part.log_speedup_of_parts AS log_speedup_excess,
    CASE WHEN whole.timing_status = 'ok' AND NOT part.all_ok THEN 'noisy' ELSE whole.timing_status END AS timing_status,
    part.parts_missing
FROM part
JOIN card AS whole ON whole.experiment = part.experiment AND whole.variant = part.variant;
