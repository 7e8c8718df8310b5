"""The suite on a tiny checkpoint with an outlier put into it: where it is found, by layer too, and that a rotation takes it away."""

import json
from datetime import UTC, datetime

import pytest
import torch

from assay.ops.apply import apply
from assay.ops.measure import measure
from assay.ops.suites import subject as opening
from assay.ops.suites.subject import Subject
from assay.schemas.facts import Measurement
from assay.schemas.metrics import METRICS
from assay.schemas.protocols import Outliers
from assay.schemas.rounding import Quantize, Rotate
from assay.schemas.texts import Text

PROTOCOL = Outliers(text=Text(path="text.txt"), windows=3, length=33)
TEXT = "".join(f"In {1900 + index} they said nothing new about it; " for index in range(40))


@pytest.fixture
def plain(make_llama, save_checkpoint_dir, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    return save_checkpoint_dir(make_llama(layers=3), tmp_path / "plain")


@pytest.fixture
def spiked(make_llama, save_checkpoint_dir, tmp_path, plain):
    """The token ``;`` writes 5,000 into channel 9, and block 1 reads it through a gain of 50 on channel 30."""
    model = make_llama(layers=3)
    with torch.no_grad():
        model.model.embed_tokens.weight[opening.tokenizer_of(plain)(";")["input_ids"][0], 9] = -5000.0
        model.model.layers[1].input_layernorm.weight[30] = 50.0
    return save_checkpoint_dir(model, tmp_path / "spiked")


def run(directory, protocol=PROTOCOL):
    opening.model_of.cache_clear()
    opening.tokenizer_of.cache_clear()
    result = measure(protocol, Subject(directory, None, None, directory), reference=None, experiment_dir=directory.parent)
    assert {row["metric"] for row in result.metrics} == set(METRICS["outliers"])
    assert result.pictures["largest_activation"].startswith(b"\x89PNG")
    json.dumps([result.metrics, result.items, result.notes], allow_nan=False)
    for row in result.metrics:
        Measurement(
            artifact_digest="a", base_digest="a", protocol_digest="p", suite="outliers", run="r", measured_at=datetime.now(UTC), **row
        )
    return result


def rows(result, slice="all"):
    return {row["metric"]: row for row in result.metrics if row["slice"] == slice}


def test_facts_are_those_of_plain_forwards(plain):
    found = run(plain)
    model, tokenizer = opening.model_of(plain, "float32"), opening.tokenizer_of(plain)
    windows = torch.tensor(tokenizer(TEXT)["input_ids"][:99]).view(3, 33)
    with torch.inference_mode():
        states = model(input_ids=windows, use_cache=False, output_hidden_states=True).hidden_states
    for layer in range(3):
        largest = rows(found, f"model.layers.{layer}")["largest_activation"]
        assert largest["value"] == pytest.approx(float(states[layer].abs().max()), rel=1e-4) and largest["slice_kind"] == "layer"
    per_window = [
        (float(states[layer][window].abs().max()), float(states[layer][window].double().std(correction=0)))
        for layer in range(3)
        for window in range(3)
    ]
    value, deviation = max(per_window)
    whole = rows(found)
    assert whole["largest_activation"]["value"] == pytest.approx(value, rel=1e-4) and whole["largest_activation"]["n"] == 99
    assert whole["largest_activation_sigmas"]["value"] == pytest.approx(value / deviation, rel=1e-4)
    assert whole["massive_activations"]["value"] == 0 and found.notes["windows"] == 3


def test_a_massive_activation_is_counted_where_it_is_and_told_with_its_place(spiked):
    found = run(spiked)
    ids = torch.tensor(opening.tokenizer_of(spiked)(TEXT)["input_ids"][:99]).view(3, 33)
    semicolons = (ids == opening.tokenizer_of(spiked)(";")["input_ids"][0]).nonzero().tolist()
    assert len(semicolons) == 2
    whole = rows(found)
    assert whole["massive_activations"]["value"] == sum(
        rows(found, f"model.layers.{layer}")["massive_activations"]["value"] for layer in range(3)
    )
    assert rows(found, "model.layers.0")["massive_activations"]["value"] == 2
    assert rows(found, "model.layers.0")["largest_activation"]["value"] == 5000
    message = whole["largest_activation"]["message"]
    assert (
        "channel 9" in message
        and message.startswith("-5")
        and any(f"window {window}, token {token}," in message for window, token in semicolons)
    )


def test_channels_that_stand_out_are_those_of_the_layers_that_read_them(spiked, plain):
    found = run(spiked)
    reading = {name for name, count in found.notes["outlier_channels"].items() if count}
    assert rows(found)["outlier_layers_share"]["value"] == len(reading) / 21 and rows(found)["outlier_layers_share"]["n"] == 21
    assert rows(found)["worst_channel_ratio"]["value"] > 5 * rows(run(plain))["worst_channel_ratio"]["value"]
    assert rows(found)["worst_channel_ratio"]["message"] == "model.layers.1.self_attn.q_proj"


def test_a_rotation_takes_them_away_and_rounding_does_not(spiked, tmp_path):
    variants = {"rotated": Rotate(method="hadamard"), "rounded": Quantize(format="int8", group_size=32)}
    found = {"spiked": rows(run(spiked))}
    for name, step in variants.items():
        (tmp_path / name).mkdir()
        apply(step, spiked, tmp_path / name)
        found[name] = rows(run(tmp_path / name))
    values = {name: each["massive_activations"]["value"] for name, each in found.items()}
    assert values["rotated"] == 0 < values["spiked"] == values["rounded"]
    sigmas = {name: each["largest_activation_sigmas"]["value"] for name, each in found.items()}
    assert sigmas["rotated"] < sigmas["spiked"] / 4 and sigmas["rounded"] == pytest.approx(sigmas["spiked"], rel=0.05)
    assert found["rounded"]["largest_activation"]["path"] == "dequantized"


def test_a_bos_that_the_tokenizer_adds_is_position_0(make_llama, tmp_path, save_checkpoint_dir):
    from tokenizers.processors import TemplateProcessing

    (tmp_path / "text.txt").write_text(TEXT)
    model = make_llama(layers=2)
    with torch.no_grad():
        model.model.embed_tokens.weight[1, 5] = 9000.0
    directory = save_checkpoint_dir(model, tmp_path / "bos")
    tokenizer = opening.tokenizer_of(directory)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save_pretrained(directory)
    found = run(directory)
    assert found.notes["bos"] == 1 and rows(found)["largest_activation"]["n"] == 3 * 34
    assert ", token 0, channel 5" in rows(found)["largest_activation"]["message"]


def test_a_text_that_is_too_short_is_refused(plain):
    with pytest.raises(ValueError, match="fewer than the 33,000"):
        run(plain, PROTOCOL.model_copy(update={"windows": 1000}))
