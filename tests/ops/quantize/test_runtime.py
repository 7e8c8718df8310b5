"""What runs beside the weights: said in ``config.json``, read back bit for bit, and done in its order."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.ops.quantize.activations import Activations, quantize_activations
from assay.ops.quantize.rotate import Online
from assay.ops.quantize.runtime import Runtime, describe, runtime_of, start

IDS = torch.arange(3, 27).unsqueeze(0)
DOWN = Online("mlp.down_proj", "input", 128)


@settings(max_examples=60, deadline=None)
@given(
    format=st.sampled_from(["int8", "int4", "fp8_e4m3"]), symmetric=st.booleans(), clip=st.floats(0.125, 1),
    scale=st.one_of(st.none(), st.floats(2.0**-100, 2.0**100, width=32)), zero=st.integers(-128, 127),
)  # fmt: skip
def test_it_comes_back_from_json_bit_for_bit(format, symmetric, clip, scale, zero):
    static = scale is not None
    how = Activations(
        format, "tensor" if static else "token", symmetric, clip, torch.tensor([scale]) if static else None,
        torch.tensor([float(zero)]) if static and not symmetric else None,
    )  # fmt: skip
    back = runtime_of({"assay": json.loads(json.dumps(describe(Runtime({"a.b": how}, (DOWN,))), allow_nan=False))})
    assert back.online == (DOWN,) and back.activations["a.b"][:4] == how[:4]
    for one, other in zip(back.activations["a.b"][4:], how[4:], strict=True):
        assert (one is None and other is None) or (one.dtype == other.dtype and torch.equal(one, other))


def test_nothing_is_said_where_nothing_runs():
    assert not Runtime() and describe(Runtime()) == {} and runtime_of({}) == Runtime() and runtime_of({"assay": {}}) == Runtime()


@pytest.mark.parametrize("said", [{"sparsity": 2}, {"online": [], "activation": {}}])
def test_what_this_version_does_not_know_is_refused_by_name(said):
    with pytest.raises(
        ValueError, match=r"config\.json asks for (sparsity|activation) beside the weights; activations and online are known"
    ):
        runtime_of({"assay": said})


@torch.no_grad()
def test_inputs_are_turned_first_and_rounded_then(tl8):
    """The other way round the rounded input would be turned, and its numbers would be on no grid."""
    how = Activations("int4", symmetric=False)
    module, seen = tl8.model.layers[1].mlp.down_proj, []
    handle = module.register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    tl8(IDS)
    handle.remove()
    start(tl8, Runtime({"model.layers.1.mlp.down_proj": how}, (DOWN,)))
    module.register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    tl8.model.layers[0].mlp.down_proj._forward_pre_hooks.clear()  # else this layer reads other numbers than before
    tl8(IDS)
    assert torch.allclose(seen[1], quantize_activations(DOWN.turn(seen[0]), how), atol=1e-5)
    assert not torch.allclose(seen[1], DOWN.turn(quantize_activations(seen[0], how)), atol=1e-2)
    assert all(len(row.unique()) <= 16 for row in seen[1][0])


def test_what_is_read_and_written_as_a_checkpoint_stays_as_it_is(tl8):
    before = {name: tensor.clone() for name, tensor in tl8.state_dict().items()}
    start(tl8, Runtime({"model.layers.0.self_attn.o_proj": Activations()}, (DOWN, Online("self_attn", "after_rope", 16))))
    after = tl8.state_dict()
    assert list(after) == list(before) and all(torch.equal(tensor, after[name]) for name, tensor in before.items())


@pytest.mark.parametrize(
    ("runtime", "said"),
    [
        (Runtime({"model.layers.9.mlp.up_proj": Activations()}), r"model\.layers\.9\.mlp\.up_proj is no nn\.Linear"),
        (Runtime(online=(Online("mlp.up_down", "input", 8),)), "no module of LlamaForCausalLM is named mlp.up_down"),
        (Runtime({"model.layers.0.mlp.up_proj": Activations(per="tensor")}), "activations per tensor have no scale"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(tl8, runtime, said):
    with pytest.raises(ValueError, match=said):
        start(tl8, runtime)
