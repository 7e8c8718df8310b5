"""What is known of all variants of one base, over every experiment: what choosing among them reads. Not here: choosing."""

from duckdb import DuckDBPyConnection

# Of each metric the newest number that counts; a timing only of the device that is asked for.
_SQL = """
SELECT experiment, variant, metric, arg_max(value, measured_at) AS value
FROM fact
WHERE base = $base AND value IS NOT NULL AND status = 'ok' AND (device_digest IS NULL OR device_digest = $device)
GROUP BY experiment, variant, metric
ORDER BY experiment, variant, metric
"""


def known(warehouse: DuckDBPyConnection, *, base: str, device: str) -> dict[tuple[str, str], dict[str, float]]:
    """(experiment, variant) → metric → value, of every variant of ``base`` that is declared; see ``views/fact.sql``.

    Args:
        device: the digest of the device whose timings are wanted; those of others are left out, and so is what is noisy.
    """
    found: dict[tuple[str, str], dict[str, float]] = {}
    for experiment, variant, metric, value in warehouse.sql(_SQL, params={"base": base, "device": device}).fetchall():
        found.setdefault((experiment, variant), {})[metric] = value
    return found


def residuals(warehouse: DuckDBPyConnection, *, device: str) -> list[float]:
    """ln(measured / predicted) of every decode timing without a draft on ``device``; see ``views/roofline.sql``."""
    sql = """
        SELECT r.log_residual FROM roofline AS r JOIN device AS d ON d.name = r.device
        WHERE d.device_digest = $device AND r.metric IN ('decode_tok_s', 'decode_no_draft_tok_s') AND r.tokens_per_forward = 1
    """
    return [value for (value,) in warehouse.sql(sql, params={"device": device}).fetchall()]
