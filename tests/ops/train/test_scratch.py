"""Models from nothing: as many weights as the closed form says, the same by seed, and next-token training that learns."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from assay.ops.train.loop import Settings
from assay.ops.train.scratch import Shape, ffn_for, learn, make, parameters

SMALL = Shape(layers=2, hidden=32, ffn=64, heads=4, kv_heads=2, vocabulary=64)


def shapes():
    heads = st.sampled_from([(1, 1), (2, 1), (4, 2), (4, 4), (6, 3)])
    return st.builds(
        lambda layers, heads, dim, ffn, vocabulary, tied: Shape(layers, heads[0] * dim, ffn, *heads, vocabulary, tied),
        st.integers(1, 4), heads, st.sampled_from([2, 4, 8]), st.integers(1, 40), st.integers(4, 90), st.booleans(),
    )  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(shape=shapes())
def test_the_closed_form_counts_the_weights_of_the_model(shape):
    assert parameters(shape) == sum(parameter.numel() for parameter in make(shape).parameters())


def test_the_count_of_a_published_model():
    """SmolLM2-135M: 134,515,008 weights."""
    assert parameters(Shape(layers=30, hidden=576, ffn=1536, heads=9, kv_heads=3, vocabulary=49_152)) == 134_515_008


@settings(max_examples=60, deadline=None)
@given(shape=shapes(), more=st.integers(0, 50_000), divisor=st.sampled_from([1, 8]))
def test_the_ffn_is_the_widest_that_fits_the_budget(shape, more, divisor):
    budget = parameters(shape._replace(ffn=divisor)) + more
    found = ffn_for(shape, budget, divisor=divisor)
    assert found.ffn % divisor == 0 and found._replace(ffn=shape.ffn) == shape
    assert parameters(found) <= budget < parameters(found._replace(ffn=found.ffn + divisor))


def test_deep_and_wide_models_of_one_budget_differ_by_less_than_a_column():
    budget = 300_000
    deep = ffn_for(SMALL._replace(layers=12), budget)
    wide = ffn_for(SMALL._replace(layers=2, hidden=96), budget)
    assert all(0 <= budget - parameters(shape) < 3 * shape.hidden * shape.layers for shape in (deep, wide))
    with pytest.raises(
        ValueError, match=r"a budget of 1,000 weights for 2 layers of width 32 .* they take at least [\d,]+, with an FFN of 1"
    ):
        ffn_for(SMALL, 1000)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"layers": 0}, "layers is below 1"),
        ({"hidden": 30}, "a width of 30 in 4 heads; an even number of channels a head"),
        ({"hidden": 36}, "a width of 36 in 4 heads"),
        ({"kv_heads": 3}, "4 query heads on 3 key heads; a divisor of 4"),
    ],
)
def test_a_shape_that_no_model_has_is_refused(change, says):
    for function in (parameters, make):
        with pytest.raises(ValueError, match=says):
            function(SMALL._replace(**change))


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_is_its_seed_and_opens_from_its_plain_config(tied, tmp_path):
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    shape = SMALL._replace(tied=tied)
    one, same, other = (make(shape, seed=seed, special={"eos_token_id": 2}) for seed in (0, 0, 1))
    assert torch.equal(torch.rand(2), expected)
    state = one.state_dict()
    assert all(torch.equal(tensor, same.state_dict()[name]) for name, tensor in state.items())
    assert not torch.equal(state["model.layers.0.mlp.up_proj.weight"], other.state_dict()["model.layers.0.mlp.up_proj.weight"])
    assert (one.lm_head.weight.data_ptr() == one.model.embed_tokens.weight.data_ptr()) == tied and one.config.eos_token_id == 2
    one.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        assert torch.equal(again(ids).logits, one(ids).logits) and again.dtype == torch.float32


def test_what_writes_to_the_residual_stream_is_smaller_the_deeper_the_model_is():
    for layers in (2, 8):
        model = make(SMALL._replace(layers=layers, hidden=64, ffn=128))
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                writes = name.endswith(("o_proj.weight", "down_proj.weight"))
                assert parameter.std().item() == pytest.approx(0.02 / (math.sqrt(2 * layers) if writes else 1), rel=0.1)


def test_next_tokens_that_follow_a_rule_are_learned(tmp_path):
    """Each token is the one before it plus 5: from log 60 = 4.1 nats to nearly nothing; and a stopped run goes on."""
    begin = torch.randint(0, 60, (260, 1), generator=torch.Generator().manual_seed(0))
    windows = 3 + (begin + 5 * torch.arange(16)) % 60
    asked = Settings(steps=60, learning_rate=1e-2, warmup_steps=5, record_every=20, evaluate_every=20, save_seconds=0.0)

    def stop(now):
        if now.step == 31:
            raise KeyboardInterrupt

    model, later = make(SMALL), make(SMALL)
    points = learn(model, windows[:240], windows[240:], settings=asked)
    assert points[0].metrics["log_perplexity"] == pytest.approx(math.log(64), abs=0.2)
    assert points[-1].metrics["log_perplexity"] < 1 and points[-1].tokens == 60 * 8 * 15
    with torch.no_grad():
        q = model(windows[240:]).logits[:, :-1].log_softmax(-1)
    assert points[-1].metrics["log_perplexity"] == pytest.approx(-q.gather(-1, windows[240:, 1:, None]).mean().item(), rel=1e-4)
    with pytest.raises(KeyboardInterrupt):
        learn(make(SMALL), windows[:240], windows[240:], settings=asked, state=tmp_path, progress=stop)
    assert learn(later, windows[:240], windows[240:], settings=asked, state=tmp_path) == points
    with pytest.raises(ValueError, match="the text has ids beyond the 64 of the model"):
        learn(make(SMALL), windows + 10, windows, settings=asked)
