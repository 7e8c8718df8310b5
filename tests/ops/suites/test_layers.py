"""The suite on packed checkpoints: its facts against the weights themselves, each layer by name, and what it refuses."""

import json
from datetime import UTC, datetime
from statistics import fmean

import pytest
import torch
from safetensors.torch import load_file

from assay.ops.apply import apply
from assay.ops.measure import measure
from assay.ops.quantize.by_layer import write
from assay.ops.quantize.statistics import largest_sigmas, snr_db
from assay.ops.suites import subject as opening
from assay.ops.suites.layers import by_projection
from assay.ops.suites.subject import Subject
from assay.schemas.facts import Measurement
from assay.schemas.metrics import METRICS
from assay.schemas.protocols import Layers
from assay.schemas.rounding import Gptq, Quantize
from assay.schemas.texts import Calibration


def packed(directory, parent, **step):
    directory.mkdir()
    windows = torch.randint(3, 98, (2, 24), generator=torch.Generator().manual_seed(0))
    apply(Quantize(**{"format": "int4", "group_size": 32, **step}), parent, directory, windows=windows)
    return directory


def run(directory):
    opening.model_of.cache_clear()
    result = measure(Layers(), Subject(directory, None, None, directory), reference=None, experiment_dir=None)
    assert opening.model_of.cache_info().misses == 0  # no model is opened
    assert {row["metric"] for row in result.metrics} <= set(METRICS["layers"])
    json.dumps([result.metrics, result.items, result.notes], allow_nan=False)
    for row in result.metrics:
        Measurement(
            artifact_digest="a", base_digest="a", protocol_digest="p", suite="layers", run="r", measured_at=datetime.now(UTC), **row
        )
    return result


def values(result, kind="all"):
    return {(row["metric"], row["slice"]): row for row in result.metrics if row["slice_kind"] == kind}


def test_facts_are_those_of_the_weights_before_and_after(tl8, tl8_dir, tmp_path):
    directory = packed(tmp_path / "packed", tl8_dir)
    found = run(directory)
    after = opening.model_of(directory, "float32").state_dict()
    layers = values(found, "layer")
    names = [name.removesuffix(".weight") for name in tl8.state_dict() if name.endswith("proj.weight")]
    assert {name for _, name in layers} == set(names) and len(names) == 28
    before = {name: tl8.state_dict()[f"{name}.weight"] for name in names}
    snr = {name: snr_db(weight, after[f"{name}.weight"]) for name, weight in before.items()}
    sigmas = {name: largest_sigmas(weight) for name, weight in before.items()}
    for name in names:
        assert layers["snr_db", name]["value"] == pytest.approx(snr[name], rel=1e-4)
        assert layers["largest_sigmas", name]["value"] == pytest.approx(sigmas[name], rel=1e-4)
        assert layers["clipped_share", name]["value"] == 0 and layers["quantized_bits", name]["value"] == 4.5
        assert layers["snr_db", name]["unit"] == "dB" and layers["snr_db", name]["n"] == 1
    whole = {name: row for (name, _), row in values(found).items()}
    assert whole["snr_db"]["value"] == pytest.approx(fmean(snr.values()), rel=1e-4) and whole["snr_db"]["n"] == 28
    assert whole["snr_lowest_db"]["value"] == pytest.approx(min(snr.values()), rel=1e-4)
    assert whole["snr_lowest_db"]["message"] == min(snr, key=snr.__getitem__)
    assert whole["largest_sigmas"]["value"] == pytest.approx(max(sigmas.values()), rel=1e-4)
    assert whole["largest_sigmas"]["message"] == max(sigmas, key=sigmas.__getitem__)
    assert whole["quantized_bits"]["value"] == 4.5 and "output_error" not in whole
    assert found.pictures["snr"].startswith(b"\x89PNG") and found.notes == {"layers": 28, "forms": {"int4": 28}}


def test_what_was_clipped_and_the_error_of_outputs_are_told_where_they_are_known(tl8_dir, tmp_path):
    clipped = {
        name: row["value"]
        for (name, _), row in values(run(packed(tmp_path / "clipped", tl8_dir, range="percentile", keep_permille=900))).items()
    }
    assert 0.02 < clipped["clipped_share"] < 0.2
    gptq = run(packed(tmp_path / "gptq", tl8_dir, method="gptq", gptq=Gptq(), calibration=Calibration(windows=2, length=24)))
    errors = [row["value"] for (name, _), row in values(gptq, "layer").items() if name == "output_error"]
    assert len(errors) == 28 and values(gptq)["output_error", "all"]["value"] == pytest.approx(fmean(errors))


def test_bits_of_all_layers_together_are_weighed_by_their_size(tl8_dir, tmp_path):
    """Layers of mixed formats: the mean of their bits is not the bits of all weights."""
    mixed = {"millibits": 5_000, "formats": ("int8", "int4"), "windows": 1}
    found = run(packed(tmp_path / "mixed", tl8_dir, mixed=mixed, calibration=Calibration(windows=2, length=24)))
    by_layer = {name: row["value"] for (metric, name), row in values(found, "layer").items() if metric == "quantized_bits"}
    sizes = {name.removesuffix(".weight"): tensor.numel() for name, tensor in load_file(tl8_dir / "model.safetensors").items()}
    weighed = sum(sizes[name] * bits for name, bits in by_layer.items()) / sum(sizes[name] for name in by_layer)
    assert values(found)["quantized_bits", "all"]["value"] == pytest.approx(weighed)
    assert weighed <= 5 and set(by_layer.values()) == {4.5, 8.5}
    assert set(found.notes["forms"]) == {"int8", "int4"} and abs(fmean(by_layer.values()) - weighed) > 0.01


def test_a_layer_that_rounding_did_not_change_has_no_ratio_and_is_left_out_of_the_mean(tl8_dir, tmp_path):
    directory = packed(tmp_path / "packed", tl8_dir)
    same, other = "model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"
    write(
        directory,
        {
            same: {"form": "int4", "bits": 4.5, "snr_db": None, "largest_sigmas": 2.0},
            other: {"form": "int4", "bits": 4.5, "snr_db": 20.0, "largest_sigmas": 3.0},
        },
    )
    found = run(directory)
    row = values(found, "layer")["snr_db", same]
    assert (row["value"], row["status"], row["message"]) == (None, "not_finite", "nothing changed")
    assert values(found)["snr_db", "all"]["value"] == 20 and values(found)["snr_db", "all"]["n"] == 1
    write(directory, {same: {"form": "int4", "bits": 4.5, "snr_db": None, "largest_sigmas": 2.0}})
    alone = run(directory)
    assert values(alone)["snr_lowest_db", "all"]["status"] == "not_finite" and alone.pictures == {}


def test_a_checkpoint_without_a_record_of_its_layers_is_refused(tl8_dir):
    with pytest.raises(ValueError, match=r"has no layers\.json.*quantize"):
        run(tl8_dir)


def test_layers_are_drawn_by_block_and_projection_and_experts_by_their_worst():
    values = {
        "model.layers.0.self_attn.q_proj": 30.0, "model.layers.2.self_attn.q_proj": 20.0, "model.layers.2.mlp.experts.0.down_proj": 25.0,
        "model.layers.2.mlp.experts.1.down_proj": 15.0, "h.1.down_proj": 5.0, "1.down_proj": 7.0, "lm_head": 1.0,
    }  # fmt: skip
    assert by_projection(values) == {"q_proj": [30.0, None, 20.0], "down_proj": [None, 5.0, 15.0]}
    assert by_projection({"lm_head": 1.0}) == {}
