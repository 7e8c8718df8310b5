"""What `assay compare` says of two variants: better, worse, or how large a difference would have been found."""

from datetime import UTC, datetime
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from assay.assets import cli
from assay.assets.compare import compare, verdict
from assay.schemas.facts import Item, Measurement, ProtocolRow, VariantRow
from assay.warehouse.database import connect
from assay.warehouse.facts import FactStore

NOW = datetime(2026, 11, 1, tzinfo=UTC)
ACCURACY = {"base": [0.0] * 20, "int4": [1.0] * 8 + [0.0] * 12, "int3": [1.0] + [0.0] * 19, "bare": []}
MARGIN = {"base": [0.5, 1.0, 1.5, 2.0] * 5, "int4": [0.25, 0.5, 1.5, 1.0] * 5, "int3": [0.5, 1.0, 1.5, 2.0] * 5, "bare": []}


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    store = FactStore(tmp_path_factory.mktemp("compare") / "facts")
    store.append("protocol", [ProtocolRow(protocol_digest="p", name="choice", suite="choice", spec_json='{"suite": "choice"}')])
    for name in ACCURACY:
        spec = "[]" if name == "base" else '[{"kind": "quantize"}]'
        store.append("variant", [VariantRow(experiment="e", variant=name, base="tiny", artifact_digest=name, target_digest=name, checkpoint_digest=name, spec_json=spec, recorded_at=NOW)])  # fmt: skip
        values = {"accuracy/piqa": ACCURACY[name], "margin_nats/piqa": MARGIN[name]}
        common = {"artifact_digest": name, "protocol_digest": "p", "suite": "choice", "run": "r"}
        store.append("item", [Item(item=at, metric=metric, value=value, **common) for metric, some in values.items() for at, value in enumerate(some)])  # fmt: skip
        store.append(
            "measurement", [Measurement(base_digest="base", metric="accuracy", value=0.5, unit="1", n=20, measured_at=NOW, **common)]
        )
    return store


def test_what_is_better_what_is_worse_and_what_is_not_known(facts):
    """Eight of 20 items right where the base has none: p = 2 / 2⁸. A margin that is lower on three of four items, by 0.5 on average."""
    with connect(facts.root) as connection:
        accuracy, margin = compare(connection, "e", "int4")
        assert (accuracy.metric, accuracy.n, accuracy.difference, accuracy.verdict) == ("accuracy/piqa", 20, 0.4, "better")
        assert accuracy.p == pytest.approx(2 / 2**8) and accuracy.p_holm == pytest.approx(4 / 2**8) and accuracy.bootstrap is None
        assert (margin.metric, margin.difference, margin.verdict) == ("margin_nats/piqa", -0.4375, "worse")
        assert margin.bootstrap is not None and margin.bootstrap[0] < -0.4375 < margin.bootstrap[1] < 0
        accuracy, margin = compare(connection, "e", "int3", "base")
        assert accuracy.verdict == "no difference found; one of 0.37 would have been (4 times of 5)"
        assert margin.verdict == "no difference found: every item is equal"
        assert [row.verdict for row in compare(connection, "e", "base", "int4")] == ["worse", "better"]


@pytest.mark.parametrize(("names", "said"), [
    (("x", "int4"), "no experiment 'x'; it has e"), (("e", "int5"), "no variant 'int5' that was built; it has bare, base, int3, int4"),
    (("e", "base"), "compared with itself"), (("e", "bare"), "have no items under one protocol"),
])  # fmt: skip
def test_what_cannot_be_compared_is_refused_with_what_could(facts, names, said):
    with connect(facts.root) as connection, pytest.raises(ValueError, match=said):
        compare(connection, *names)


@pytest.mark.parametrize(("arguments", "said"), [
    (("better", 0.1, None, 0.01), "better"), (("differs", 0.1, None, 0.01), "differs; neither direction is better"), ((None, None, None, None), "one item says nothing"),
    (("none", 0.1, False, 0.01), "no difference found above the noise of measuring it twice"), (("none", None, None, 1.0), "no difference found; so few items would have shown none"),
    (("none", 0.125, None, 0.5), "no difference found; one of 0.12 would have been (4 times of 5)"),
])  # fmt: skip
def test_a_verdict_in_words(arguments, said):
    assert verdict(*arguments) == said


def test_the_command_prints_a_line_a_metric(facts, monkeypatch):
    monkeypatch.setitem(cli._context, "workspace", lambda: SimpleNamespace(facts=facts))
    monkeypatch.setattr(cli.console, "_width", 250)
    done = CliRunner().invoke(cli.app, ["compare", "e", "int4"])
    assert done.exit_code == 0, done.output
    assert "accuracy/piqa" in done.output and "better" in done.output and "worse" in done.output and "0.0078" in done.output
