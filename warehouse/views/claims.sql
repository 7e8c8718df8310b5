-- Which published statements do our own numbers support, refute, or leave open?
-- Grain: one row per claim, experiment and base that has facts for it; a claim without any has one row, which names the experiment that would decide it.
-- value, low, high: the number that decides and its 95 % interval, as `metric` says; both equal to it where it was counted or computed, NULL where no
-- error is known. n: what is behind it. verdict: supported or refuted where the whole interval is on one side of the threshold, undecided where it is
-- not, not measured, not comparable (reason says why). direction, threshold, upto: of the published statement, never of our numbers.
-- detail: the parts of the value. The statement of each is a file of claims/.
CREATE OR REPLACE MACRO mean_error(error) AS CASE WHEN count(error) = count(*) THEN avg(error) END;  -- of a mean of what may hang together
CREATE OR REPLACE MACRO difference_error(a, b) AS sqrt(a ** 2 + b ** 2);
CREATE OR REPLACE MACRO ratio_error(a, a_error, b, b_error) AS sqrt(a_error ** 2 + (a / nullif(b, 0) * b_error) ** 2) / nullif(abs(b), 0);
CREATE OR REPLACE MACRO beside_published(name, ours, published) AS
    format('{}: {:.5g}, published {:.5g}', name, CAST(ours AS DOUBLE), CAST(published AS DOUBLE));
-- The answers of claims/*.sql. The view is made over an empty table of their columns, and the real one is put in its place: so nothing is planned before
-- someone asks. What the queries read (`compared`, `made_of`, `by_slice`) is kept as rows.
CREATE OR REPLACE MACRO claim_answers() AS TABLE (
    SELECT
        CAST(NULL AS VARCHAR) AS id, CAST(NULL AS VARCHAR) AS experiment, CAST(NULL AS VARCHAR) AS base, CAST(NULL AS DOUBLE) AS value,
        CAST(NULL AS DOUBLE) AS error, CAST(NULL AS BIGINT) AS n, CAST(NULL AS VARCHAR) AS reason, CAST(NULL AS VARCHAR) AS detail
    WHERE false
);
CREATE OR REPLACE VIEW claims AS
WITH declared AS (
    SELECT * REPLACE (CAST(threshold AS DOUBLE) AS threshold, CAST(upto AS DOUBLE) AS upto) FROM (VALUES {declared}) AS headers (
        id, statement, published, source, kind, metric, direction, threshold, upto, experiment, note
    )
), found AS (
    SELECT *, value - 1.96 * error AS low, value + 1.96 * error AS high FROM claim_answers() WHERE value IS NOT NULL
)
SELECT
    d.id, d.statement, d.kind, d.published, f.value, f.low, f.high, f.n, f.base, coalesce(f.experiment, d.experiment) AS experiment,
    CASE
        WHEN f.id IS NULL THEN 'not measured'
        WHEN f.reason IS NOT NULL THEN 'not comparable'
        WHEN CASE d.direction
            WHEN 'above' THEN f.low > d.threshold
            WHEN 'at_least' THEN f.low >= d.threshold
            WHEN 'below' THEN f.high < d.threshold
            WHEN 'at_most' THEN f.high <= d.threshold
            WHEN 'between' THEN f.low >= d.threshold AND f.high <= d.upto
        END THEN 'supported'
        WHEN CASE d.direction
            WHEN 'above' THEN f.high <= d.threshold
            WHEN 'at_least' THEN f.high < d.threshold
            WHEN 'below' THEN f.low >= d.threshold
            WHEN 'at_most' THEN f.low > d.threshold
            WHEN 'between' THEN f.high < d.threshold OR f.low > d.upto
        END THEN 'refuted'
        ELSE 'undecided'
    END AS verdict,
    d.metric, d.direction, d.threshold, d.upto, f.reason, f.detail, d.note, d.source
FROM declared AS d
LEFT JOIN found AS f ON f.id = d.id
ORDER BY position(d.id[1] IN 'sdqaekpc'), d.id, experiment, base;
CREATE OR REPLACE MACRO claim_answers() AS TABLE (
    SELECT
        CAST(NULL AS VARCHAR) AS id, CAST(NULL AS VARCHAR) AS experiment, CAST(NULL AS VARCHAR) AS base, CAST(NULL AS DOUBLE) AS value,
        CAST(NULL AS DOUBLE) AS error, CAST(NULL AS BIGINT) AS n, CAST(NULL AS VARCHAR) AS reason, CAST(NULL AS VARCHAR) AS detail
    WHERE false
    {answers}
);
