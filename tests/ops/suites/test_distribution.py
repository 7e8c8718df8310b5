"""The suite on a tiny checkpoint whose head is wider than its tokenizer: its facts against full forwards, their slices, and what it refuses."""

import json
import math
from datetime import UTC, datetime

import pytest
import torch
from pydantic import ValidationError

from assay.ops.measure import measure
from assay.ops.suites import subject as opening
from assay.ops.suites.subject import Subject
from assay.schemas.facts import Measurement
from assay.schemas.metrics import METRICS
from assay.schemas.protocols import Distribution
from assay.schemas.texts import Text

PROTOCOL = Distribution(text=Text(path="text.txt"), tokens=150, window=64, temperatures=(0.7, 2.0), top_k=(1, 5), batch=2)


@pytest.fixture
def base(make_llama, save_checkpoint_dir, tmp_path):
    """Weights that say moderately much, so that entropies are neither nothing nor all."""
    opening.model_of.cache_clear()
    opening.tokenizer_of.cache_clear()
    model = make_llama(layers=2)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.2)
    (tmp_path / "text.txt").write_text("".join(f"In {1900 + index} they said nothing new about it. " for index in range(40)))
    return save_checkpoint_dir(model, tmp_path / "base")


def run(protocol, directory, *, kv=None):
    result = measure(protocol, Subject(directory, kv, None, directory), reference=None, experiment_dir=directory.parent)
    assert {row["metric"] for row in result.metrics} == set(METRICS["distribution"])
    json.dumps([result.metrics, result.items, result.notes], allow_nan=False)
    return result


def values(result):
    return {(row["metric"], row["slice_kind"], row["slice"]): row["value"] for row in result.metrics}


def test_entropies_and_tails_are_those_of_full_forwards_over_the_ids_of_the_tokenizer(base):
    result = run(PROTOCOL, base)
    found = values(result)
    model, tokenizer = opening.model_of(base, "float32"), opening.tokenizer_of(base)
    ids = tokenizer((base.parent / "text.txt").read_text())["input_ids"][:150]
    starts = [(0, 64), (63, 127), (126, 150)]
    rows = []
    for start, stop in starts:
        with torch.inference_mode():
            rows.append(model(input_ids=torch.tensor([ids[start:stop]])).logits[0, :-1, : len(tokenizer)].double())
    assert len(tokenizer) < model.config.vocab_size and sum(map(len, rows)) == 149

    def mean(of):
        return float(torch.cat([of(part) for part in rows]).mean())

    def entropy_at(temperature):
        return mean(lambda part: torch.special.entr((part / temperature).softmax(dim=-1)).sum(dim=-1))

    assert found["entropy_mean_nats", "all", "all"] == pytest.approx(entropy_at(1.0), rel=1e-4)
    assert found["entropy_mean_nats", "temperature", "0.7"] == pytest.approx(entropy_at(0.7), rel=1e-4)
    assert found["entropy_mean_nats", "temperature", "2"] == pytest.approx(entropy_at(2.0), rel=1e-4)
    tail = mean(lambda part: 1 - (part / 2).softmax(dim=-1).topk(5).values.sum(dim=-1))
    assert found["tail_mass", "temperature_k", "2/5"] == pytest.approx(tail, rel=1e-4)
    assert ("entropy_mean_nats", "temperature", "1") not in found  # not asked for
    firsts = [float(torch.special.entr(part.softmax(dim=-1)).sum(dim=-1).mean()) for part in rows]
    assert [item["value"] for item in result.items] == pytest.approx(firsts, rel=1e-4)
    assert result.notes["vocabulary"] == len(tokenizer) and result.notes["windows"] == 3


def test_each_number_stands_in_its_slice_with_its_spread_over_windows(base):
    result = run(PROTOCOL, base)
    kinds: dict[str, set] = {}
    for row in result.metrics:
        kinds.setdefault(row["slice_kind"], set()).add(row["slice"])
    filters = ["top_p 0.9", "top_p 0.95", "min_p 0.05", "min_p 0.1"]
    assert kinds == {
        "all": {"all"},
        "temperature": {"0.7", "2"},
        "temperature_k": {f"{t}/{k}" for t in ("0.7", "2") for k in (1, 5)},
        "filter_temperature": {f"{name}/{t}" for name in filters for t in ("0.7", "2")},
        "filter_temperature_k": {f"{name}/{t}/{k}" for name in filters for t in ("0.7", "2") for k in (1, 5)},
    }
    assert len(values(result)) == len(result.metrics)
    for row in result.metrics:
        if row["metric"] == "entropy_law_residual":
            assert row["value"] < 1e-6 and row["standard_error"] is None
        else:
            assert row["n"] == 149 and row["standard_error"] is not None
        Measurement(
            artifact_digest="a", base_digest="a", protocol_digest="p", suite="distribution", run="r", measured_at=datetime.now(UTC), **row
        )  # fmt: skip


def test_a_higher_temperature_spreads_and_lets_more_of_the_tail_into_top_p_than_into_min_p(base):
    found = values(run(PROTOCOL, base))
    assert (
        found["entropy_mean_nats", "temperature", "0.7"]
        < found["entropy_mean_nats", "all", "all"]
        < found["entropy_mean_nats", "temperature", "2"]
    )
    assert found["kept_tokens", "filter_temperature", "top_p 0.95/0.7"] < found["kept_tokens", "filter_temperature", "top_p 0.95/2"]
    grown = {
        name: found["kept_tail_mass", "filter_temperature_k", f"{name}/2/5"]
        - found["kept_tail_mass", "filter_temperature_k", f"{name}/0.7/5"]
        for name in ("top_p 0.95", "min_p 0.1")
    }
    assert grown["top_p 0.95"] > grown["min_p 0.1"]


def test_keys_and_values_in_fewer_bits_are_measured_as_they_are_run(base):
    plain, fewer = values(run(PROTOCOL, base)), values(run(PROTOCOL, base, kv="int8"))
    assert plain["entropy_mean_nats", "all", "all"] != fewer["entropy_mean_nats", "all", "all"]


def test_a_text_that_is_too_short_is_refused(base):
    with pytest.raises(ValueError, match="fewer than the 100,000"):
        run(PROTOCOL.model_copy(update={"tokens": 100_000}), base)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"temperatures": (0.0,)}, "greater than 0"), ({"temperatures": ()}, "empty list"), ({"temperatures": (0.7, 0.7)}, "twice"),
        ({"temperatures": (1.0, 1.00000001)}, "1 is there twice"), ({"top_k": (0,)}, "greater than or equal to 1"), ({"window": 4}, "greater"),
        ({"temperatures": (math.nan,)}, "finite"),
    ],
)  # fmt: skip
def test_a_protocol_out_of_range_is_refused(wrong, told):
    with pytest.raises(ValidationError, match=told):
        Distribution(**wrong)
