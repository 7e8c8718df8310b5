"""What other code asks of the warehouse, as polars frames: one line each over a view. Not here: what a question means (``views/*.sql``)."""

import polars as pl
from duckdb import DuckDBPyConnection

from assay.warehouse.database import experiment_view, identifier

# Variants in the order in which their experiment declares them, those of an undeclared experiment by name.
_DECLARED = "list_position((SELECT variants FROM experiment WHERE experiment = $experiment), variant), variant"


def experiments(warehouse: DuckDBPyConnection) -> list[str]:
    """The names of the experiments that have been declared, or have a variant."""
    found = warehouse.sql("SELECT experiment FROM experiment UNION SELECT experiment FROM variant ORDER BY experiment")
    return [name for (name,) in found.fetchall()]


def experiment_table(warehouse: DuckDBPyConnection, experiment: str) -> pl.DataFrame:
    """The variants of ``experiment`` with its axes as columns, in declared order; see ``database.create_experiment_view``.

    Raises:
        KeyError: no such experiment.
    """
    _must_exist(warehouse, experiment)
    view = identifier(experiment_view(warehouse, experiment))
    return warehouse.sql(f"FROM {view} ORDER BY {_DECLARED}", params={"experiment": experiment}).pl()


def scorecard(warehouse: DuckDBPyConnection, experiment: str) -> pl.DataFrame:
    """One wide row per variant, in declared order; see ``views/scorecard.sql``."""
    return _of(warehouse, "scorecard", experiment, _DECLARED)


def scorecard_protocol(warehouse: DuckDBPyConnection, experiment: str) -> pl.DataFrame:
    """Which protocol and device the scorecard shows for each suite; see ``views/scorecard_protocol.sql``."""
    return _of(warehouse, "scorecard_protocol", experiment, "suite")


def facts(warehouse: DuckDBPyConnection, experiment: str) -> pl.DataFrame:
    """Every fact about the variants, under every protocol and on every device; see ``views/fact.sql``."""
    return _of(warehouse, "fact", experiment, f"{_DECLARED}, suite, protocol, metric, seed, device")


def by_slice(warehouse: DuckDBPyConnection, experiment: str, metric: str) -> pl.DataFrame:
    """``metric`` split by token class, language or position, without the whole; see ``views/by_slice.sql``."""
    return warehouse.sql(
        "SELECT variant, metric, slice_kind, slice, value, unit, n, standard_error, status, protocol "
        f"FROM by_slice WHERE experiment = $experiment AND metric = $metric AND slice_kind <> 'all' ORDER BY {_DECLARED}, slice_kind, slice",
        params={"experiment": experiment, "metric": metric},
    ).pl()


def pareto(warehouse: DuckDBPyConnection, experiment: str) -> pl.DataFrame:
    """The variants on the front of bytes and divergence, smallest first; see ``views/pareto.sql``."""
    return _of(warehouse, "pareto", experiment, "size_bytes, kl_mean_nats, variant")


def versus_base(warehouse: DuckDBPyConnection, experiment: str) -> pl.DataFrame:
    """Each metric beside the base's; see ``views/versus_base.sql``."""
    return _of(warehouse, "versus_base", experiment, f"{_DECLARED}, suite, metric")


def work(warehouse: DuckDBPyConnection, experiment: str) -> pl.DataFrame:
    """What each variant lost on each kind of work, beside the base; see ``views/work.sql``."""
    return _of(warehouse, "work", experiment, f"{_DECLARED}, suite, protocol, work")


def paired(warehouse: DuckDBPyConnection, experiment: str, variant: str, other: str) -> pl.DataFrame:
    """Two variants on the same items, by protocol and metric, with what each test finds; see ``views/paired.sql``.

    Raises:
        KeyError: no such experiment, or it has no such variant.
    """
    _must_have(warehouse, experiment, variant, other)
    return warehouse.sql(
        "FROM paired WHERE experiment = $experiment AND variant = $variant AND other = $other ORDER BY suite, protocol, protocol_digest, metric",
        params={"experiment": experiment, "variant": variant, "other": other},
    ).pl()


def paired_differences(warehouse: DuckDBPyConnection, experiment: str, variant: str, other: str) -> pl.DataFrame:
    """The differences themselves, item by item: what ``paired`` is the mean of; see ``views/variant_item.sql``."""
    return warehouse.sql(
        "SELECT a.protocol_digest, a.metric, a.item, a.value - b.value AS difference FROM variant_item AS a JOIN variant_item AS b "
        "ON b.protocol_digest = a.protocol_digest AND b.metric = a.metric AND b.item = a.item AND b.engine IS NOT DISTINCT FROM a.engine "
        "AND b.device_digest IS NOT DISTINCT FROM a.device_digest "
        "WHERE a.experiment = $experiment AND b.experiment = $experiment AND a.variant = $variant AND b.variant = $other "
        "ORDER BY a.protocol_digest, a.metric, a.item",
        params={"experiment": experiment, "variant": variant, "other": other},
    ).pl()


def base_of(warehouse: DuckDBPyConnection, experiment: str) -> str:
    """The variant that the others of ``experiment`` are compared with; see ``views/base_variant.sql``.

    Raises:
        KeyError: no such experiment, or none of its variants is the unchanged base.
    """
    _must_have(warehouse, experiment)
    found = warehouse.sql("SELECT variant FROM base_variant WHERE experiment = $experiment", params={"experiment": experiment}).fetchall()
    if not found:
        raise KeyError(f"the experiment {experiment!r} has no variant without steps to compare with; name the other variant")
    return found[0][0]


def noise_floor(warehouse: DuckDBPyConnection, experiment: str) -> pl.DataFrame:
    """How much each metric of the variants moves by chance alone, the largest by what differed; see ``views/noise_floor.sql``."""
    return warehouse.sql(
        "SELECT DISTINCT v.variant, p.name AS protocol, f.* EXCLUDE (artifact_digest, protocol_digest, device_digest) FROM noise_floor AS f "
        "JOIN measured_variant AS v ON v.digest = f.artifact_digest AND (f.suite = 'divergence') = v.of_target "
        "JOIN protocol AS p ON p.protocol_digest = f.protocol_digest "
        "WHERE v.experiment = $experiment ORDER BY ALL",
        params={"experiment": experiment},
    ).pl()


def interaction(warehouse: DuckDBPyConnection, experiment: str) -> pl.DataFrame:
    """Combinations against the sum of their parts, the largest excess first; see ``views/interaction.sql``."""
    return _of(warehouse, "interaction", experiment, "kl_excess_nats DESC NULLS LAST, variant")


def verdicts(warehouse: DuckDBPyConnection, experiment: str) -> pl.DataFrame:
    """Whether each budget holds, the breached first; see ``views/verdict.sql``."""
    return _of(warehouse, "verdict", experiment, f"list_position(['breached', 'not_measured', 'holds'], verdict), {_DECLARED}, metric")


def regression(warehouse: DuckDBPyConnection, experiment: str | None = None, *, all: bool = False) -> pl.DataFrame:
    """What moved since the last good run, the worst first, of one experiment or every one; ``all``: also what did not.

    See ``views/regression.sql``.
    """
    return warehouse.sql(
        "FROM regression WHERE ($experiment IS NULL OR experiment = $experiment) AND ($all OR flag <> 'same') "
        "ORDER BY list_position(['lost', 'worse', 'changed', 'noisy', 'better', 'same'], flag), experiment, variant, suite, metric, "
        "protocol, device, seed",
        params={"experiment": experiment, "all": all},
    ).pl()


def claims(warehouse: DuckDBPyConnection, *, experiment: str | None = None, verdict: str | None = None) -> pl.DataFrame:
    """The published statements and what our numbers say of each, of one experiment or one verdict, or all; see ``views/claims.sql``."""
    return warehouse.sql(
        "FROM claims WHERE ($experiment IS NULL OR experiment = $experiment) AND ($verdict IS NULL OR verdict = $verdict)",
        params={"experiment": experiment, "verdict": verdict},
    ).pl()


def devices(warehouse: DuckDBPyConnection) -> pl.DataFrame:
    """The machines on which timings were taken."""
    return warehouse.sql("SELECT kind, name, cores, memory_bytes, torch_version, driver FROM device ORDER BY kind, name").pl()


def _of(warehouse: DuckDBPyConnection, view: str, experiment: str, order: str) -> pl.DataFrame:
    return warehouse.sql(f"FROM {view} WHERE experiment = $experiment ORDER BY {order}", params={"experiment": experiment}).pl()


def _must_have(warehouse: DuckDBPyConnection, experiment: str, *variants: str) -> None:
    _must_exist(warehouse, experiment)
    known = "SELECT variant FROM current_variant WHERE experiment = $experiment ORDER BY variant"
    names = [name for (name,) in warehouse.sql(known, params={"experiment": experiment}).fetchall()]
    for variant in variants:
        if variant not in names:
            raise KeyError(
                f"the experiment {experiment!r} has no variant {variant!r} that was built; it has {', '.join(names) or 'none yet'}"
            )


def _must_exist(warehouse: DuckDBPyConnection, experiment: str) -> None:
    known = experiments(warehouse)
    if experiment not in known:
        raise KeyError(f"the warehouse has no experiment {experiment!r}; it has {', '.join(known) or 'none yet'}")
