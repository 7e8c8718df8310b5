-- Arithmetic of tests and intervals that DuckDB lacks, for the views; each equals scipy (tests/warehouse/test_paired.py). Not here: what is compared.

-- Two-sided p of McNemar's exact test: b items where only one is right, c where only the other is; each way is as likely under the null, so it is
-- twice the lower tail of the binomial (b + c, 1/2). Terms beyond 10 standard deviations below the smaller count are left out (under 1e-20).
CREATE OR REPLACE MACRO mcnemar_exact(b, c) AS least(1.0, 2 * list_sum([
    exp(lgamma(b + c + 1) - lgamma(k + 1) - lgamma(b + c - k + 1) - (b + c) * ln(2))
    FOR k IN range(CAST(greatest(0, least(b, c) - ceil(5 * sqrt(b + c))) AS BIGINT), CAST(least(b, c) + 1 AS BIGINT))
]));

-- P(|T| > |t|) of Student's t. With t = √df · tan θ the density is that of cos^(df − 1): integrated from θ to where nothing is left, by the
-- trapezoidal rule after the substitution tanh(π/2 · sinh u).
CREATE OR REPLACE MACRO t_tail_from(angle, span, df) AS
    2 / sqrt(pi()) * exp(lgamma((df + 1) / 2.0) - lgamma(df / 2.0)) * span / 2 * 0.1 * list_sum([
        pi() / 2 * cosh(u / 10.0) / cosh(pi() / 2 * sinh(u / 10.0)) ** 2
        * greatest(0.0, cos(angle + span / 2 * (1 + tanh(pi() / 2 * sinh(u / 10.0))))) ** (df - 1)
        FOR u IN range(-30, 31)
    ]);
CREATE OR REPLACE MACRO t_two_sided(t, df) AS least(1.0, t_tail_from(
    atan(abs(t) / sqrt(df)), least(pi() / 2 - atan(abs(t) / sqrt(df)), 12 / sqrt(df)), df
));

-- The quantile of Student's t at the normal quantile z, by the expansion in 1/df: Fisher and Cornish 1960, doi:10.2307/1266546.
CREATE OR REPLACE MACRO t_quantile(z, df) AS
    z + (z ** 3 + z) / (4.0 * df) + (5 * z ** 5 + 16 * z ** 3 + 3 * z) / (96.0 * df ** 2)
    + (3 * z ** 7 + 19 * z ** 5 + 17 * z ** 3 - 15 * z) / (384.0 * df ** 3)
    + (79 * z ** 9 + 776 * z ** 7 + 1482 * z ** 5 - 1920 * z ** 3 - 945 * z) / (92160.0 * df ** 4);
-- Half a 95 % interval in standard errors.
CREATE OR REPLACE MACRO t_975(df) AS coalesce(
    [12.7062047362, 4.3026527297, 3.1824463053, 2.7764451052, 2.5705818356, 2.4469118511][df], t_quantile(1.9599639845, df)
);

-- Wilson's 95 % interval of a share of n: Wilson 1927, doi:10.1080/01621459.1927.10502953. n may be the effective number of independent samples.
CREATE OR REPLACE MACRO wilson_low(share, n) AS CASE WHEN share <= 0 THEN 0 ELSE greatest(0, (
    share + 1.9207294103 / n - 1.9599639845 * sqrt(share * (1 - share) / n + 0.9603647051 / n ** 2)
) / (1 + 3.8414588207 / n)) END;
CREATE OR REPLACE MACRO wilson_high(share, n) AS 1 - wilson_low(1 - share, n);

-- The smallest difference of means of n pairs that a two-sided test at 5 % finds in 80 % of samples: standard_error is of the mean difference.
CREATE OR REPLACE MACRO detectable_mean(standard_error, n) AS
    standard_error * (t_975(n - 1) + CASE WHEN n > 4 THEN t_quantile(0.8416212336, n - 1) ELSE [1.3763819205, 1.0606601718, 0.9784723124][n - 1] END);
-- The same of two shares that differ on the share `discordant` of n items: Miettinen 1968, doi:10.2307/2528462, solved for the difference. A rate of
-- discordance below the difference that it would have to hold is raised to it. NULL where even a difference of 1 would be missed.
CREATE OR REPLACE MACRO detectable_share_at(rate, n) AS
    sqrt(rate) * (1.9599639845 * sqrt(n) + sqrt(n * 3.8414588207 - (n + 0.7083263009) * (3.8414588207 - 0.7083263009))) / (n + 0.7083263009);
CREATE OR REPLACE MACRO detectable_share(discordant, n) AS
    CASE WHEN n >= 8 THEN least(1.0, detectable_share_at(greatest(discordant, 7.8488797 / n), n)) END;

-- What ran a model, without what its weights were: the same for all variants of a fair comparison.
CREATE OR REPLACE MACRO engine_of(path) AS CASE WHEN path IN ('dense', 'dequantized') THEN 'transformers' ELSE split_part(path, ',', 1) END;
