"""Harm held against plain forwards with one unit rounded; the choice against every choice that there is."""

import copy
import itertools
import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.ops.models import experts
from assay.ops.quantize.allocate import Harm, Unit, allocate, by_gptq, sensitivities, to_nearest
from assay.ops.quantize.gptq import gptq_together
from assay.ops.quantize.grid import Format, quantize
from assay.ops.quantize.hessian import Hessian
from assay.ops.quantize.layout import stored_bytes

INT8, INT4, INT2 = Format("int", 8, 32), Format("int", 4, 32), Format("int", 2, 32)
THREE = (INT8, INT4, INT2)


def some(count: int = 3, length: int = 20) -> torch.Tensor:
    return torch.randint(3, 128, (count, length), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def plain_kl(model, windows, names, format):
    """Mean KL in float64 of plain forwards, with the named weights rounded in a copy."""
    other = copy.deepcopy(model)
    for name, weight in experts.weights(other).items():
        if name in names:
            weight.copy_(quantize(weight, format).dense())
    p, q = (each(input_ids=windows, use_cache=False).logits.double().log_softmax(dim=-1) for each in (model, other))
    return float((p.exp() * (p - q)).sum(dim=-1).mean())


@pytest.mark.parametrize("name", ["llama", "gemma3", "mixtral with a window"])
def test_the_harm_of_a_unit_is_that_of_a_plain_forward_with_it_alone_rounded(make_decoder, name):
    model, windows = make_decoder(name, num_hidden_layers=2, **({"num_local_experts": 2} if "mixtral" in name else {})), some()
    formats = (Format("int", 8, 16), Format("int", 3, 16))
    harm = sensitivities(model, windows, formats, batch=2, chunk=7)
    assert harm.formats == formats
    assert sorted(name for unit in harm.units for name in unit.names) == sorted(experts.weights(model))
    for unit in harm.units:
        for format, kl in zip(formats, unit.kl, strict=True):
            assert kl == pytest.approx(plain_kl(model, windows, unit.names, format), rel=1e-3, abs=2e-7)
    assert max(unit.kl[1] for unit in harm.units) > 1e-3


def test_harm_under_gptq_is_that_of_weights_that_gptq_rounded_alone(make_decoder):
    """The inputs by hooks, the rounding by the layer's own function, and a plain forward."""
    model, windows = make_decoder("llama", num_hidden_layers=2), some(8, 64)
    formats, seen = (Format("int", 8, 16), Format("int", 3, 16)), {}
    linears = {
        name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear) and name in experts.weights(model)
    }
    hooks = [module.register_forward_pre_hook(lambda _, args, name=name: seen.update({name: args[0].flatten(0, 1)})) for name, module in linears.items()]  # fmt: skip
    with torch.no_grad():
        expected = model(input_ids=windows, use_cache=False).logits.double().log_softmax(dim=-1)
    for hook in hooks:
        hook.remove()
    found = sensitivities(model, windows[:2], formats, way=by_gptq(model, windows))
    plain = sensitivities(model, windows[:2], formats)
    assert [unit.bits for unit in found.units] == [unit.bits for unit in plain.units]
    for unit in found.units:
        hessian = Hessian(seen[unit.names[0]].shape[1])
        hessian.add(seen[unit.names[0]])
        other, format = copy.deepcopy(model), formats[1]
        with torch.no_grad():
            for name in unit.names:
                weight = experts.weights(other)[name]
                weight.copy_(gptq_together([weight], hessian.matrix(), format, act_order="static")[0].quantized.dense())
            q = other(input_ids=windows[:2], use_cache=False).logits.double().log_softmax(dim=-1)
        p = expected[:2]
        assert unit.kl[1] == pytest.approx(float((p.exp() * (p - q)).sum(dim=-1).mean()), rel=2e-2, abs=1e-6)
    assert sum(unit.kl[1] for unit in found.units) < sum(unit.kl[1] for unit in plain.units)


def test_an_expert_without_text_is_rounded_to_nearest_when_its_harm_under_gptq_is_measured(make_decoder):
    """Of eight experts two tokens reach four at most, two each: at least four pairs of units are to nearest, and those that were reached are not."""
    model = make_decoder("mixtral with a window", num_hidden_layers=1, num_local_experts=8)
    way, nearest = by_gptq(model, some(1, 2)), {}

    def noting(names, weights, format):
        found = way(names, weights, format)
        plain = to_nearest(names, weights, format)
        nearest[tuple(names)] = all(torch.equal(one.dense(), other.dense()) for one, other in zip(found, plain, strict=True))
        return found

    sensitivities(model, some(1, 8), (INT8, INT2), way=noting)
    of_experts = [same for names, same in nearest.items() if "experts" in names[0]]
    assert len(of_experts) == 16 and sum(of_experts) >= 8 and not all(of_experts)


def test_layers_that_share_an_input_are_one_unit_or_each_its_own(tl8):
    def short(units):
        return [tuple(name.rpartition(".")[2] for name in unit.names) for unit in units]

    whole, apart = (sensitivities(tl8, some(1, 8), (INT8, INT4), together=each).units for each in (True, False))
    assert short(whole) == [("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",)] * 4
    assert [unit.names[0] for unit in apart] == list(experts.weights(tl8)) and {len(unit.names) for unit in apart} == {1}
    assert whole[2].label == "model.layers.0.mlp.gate_proj+up_proj"


def test_a_unit_has_the_bits_that_it_is_stored_in(tl8):
    formats = (INT4, Format("int", 4, 32, symmetric=False), Format("e2m1", 4, 32, scale="e8m0"))
    for unit in sensitivities(tl8, some(1, 8), formats).units:
        weights = [experts.weights(tl8)[name] for name in unit.names]
        assert unit.weights == sum(weight.numel() for weight in weights)
        assert unit.bits == tuple(8 * sum(stored_bytes(quantize(weight, format)) for weight in weights) for format in formats)
        assert unit.bits[0] / unit.weights == 4 + 16 / 32  # bfloat16 scales of 32 weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_is_afterwards_as_it_was_and_is_measured_in_float32(make_llama, dtype):
    model = make_llama(layers=2).to(dtype)
    before = {name: (parameter.data_ptr(), parameter.clone()) for name, parameter in model.named_parameters()}
    harm = sensitivities(model, some(), THREE)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == dtype and parameter.data_ptr() == before[name][0] and parameter.equal(before[name][1])
    assert not any("forward" in vars(block) for block in model.model.layers)
    assert not any(block._forward_pre_hooks for block in model.model.layers)
    wide = copy.deepcopy(model).float()
    wide.model.rotary_emb = model.model.rotary_emb
    expected = plain_kl(wide, some(), harm.units[1].names, INT8)
    assert harm.units[1].kl[0] == pytest.approx(expected, rel=1e-2, abs=1e-7)  # bfloat16 forwards would be noise of 1e-3


def test_more_bits_harm_less(tl8):
    for unit in sensitivities(tl8, some(), THREE).units:
        assert 0 < unit.kl[0] < unit.kl[1] < unit.kl[2]


def test_a_format_that_fits_no_layer_is_refused_before_anything_is_run(tl8, monkeypatch):
    monkeypatch.setattr(tl8.model, "forward", lambda *_, **__: pytest.fail("it was run"))
    with pytest.raises(ValueError, match="group_size=48 does not divide the 64 columns") as caught:
        sensitivities(tl8, some(), (INT8, Format("int", 4, 48)))
    assert caught.value.__notes__ == ["int4 for model.layers.0.self_attn.q_proj ([64, 64])"]
    for formats in ((), (INT8,), (INT8, INT8)):
        with pytest.raises(ValueError, match="at least two formats, each once"):
            sensitivities(tl8, some(), formats)


def test_a_harm_that_is_no_number_is_refused_by_name(tl8):
    with torch.no_grad():
        tl8.model.norm.weight.fill_(1e38)
    with pytest.raises(ValueError, match=r"q_proj.* rounded to int8 is nan"):
        sensitivities(tl8, some(1, 8), (INT8, INT4))


def harm_of(kl: list[list[float]], bits: list[list[int]], weights: list[int]) -> Harm:
    units = (Unit((f"layer.{at}",), size, tuple(a), tuple(b)) for at, (a, b, size) in enumerate(zip(kl, bits, weights, strict=True)))
    return Harm(THREE[: len(kl[0])], tuple(units))


def predicted(harm, formats):
    return sum(unit.kl[harm.formats.index(formats[unit.names[0]])] for unit in harm.units)


def bits_of(harm, formats):
    return sum(unit.bits[harm.formats.index(formats[unit.names[0]])] for unit in harm.units)


def test_a_choice_worked_by_hand():
    """Two layers of 100 weights in 8 or 4 bits: with 6 bits a weight one of them may have 8, the one that it spares more."""
    harm = harm_of([[0.0, 0.1], [0.0, 0.3]], [[800, 400], [800, 400]], [100, 100])
    found = allocate(harm, budget=6)
    assert found.formats == {"layer.0": INT4, "layer.1": INT8}
    assert found.summary == {
        "budget_bits": 6, "binds": True, "bits": 6.0, "predicted_kl_nats": 0.1, "units": {"int8": 1, "int4": 1},
        "uniform": {"int4": {"bits": 4.0, "predicted_kl_nats": 0.4}}, "chosen": {"layer.0": "int4", "layer.1": "int8"},
        "sensitivities": {"layer.0": {"int8": 0.0, "int4": 0.1}, "layer.1": {"int8": 0.0, "int4": 0.3}},
    }  # fmt: skip
    assert json.loads(json.dumps(found.summary)) == found.summary


@st.composite
def harms(draw, most=6):
    """Units of any size whose harm spans nine orders of magnitude and need not fall with the bits."""
    units, formats = draw(st.integers(1, most)), draw(st.integers(2, 3))
    exponent = st.floats(-9, 0)
    kl = [[10 ** draw(exponent) for _ in range(formats)] for _ in range(units)]
    weights = [draw(st.integers(1, 50)) * 64 for _ in range(units)]
    bits = [[size * bits + 16 * draw(st.integers(0, 3)) for bits in (8, 4, 2)[:formats]] for size in weights]
    return harm_of(kl, bits, weights)


budgets = st.floats(0, 1)  # from the least to beyond the most


def budget_at(harm, share):
    least, most = (sum(pick(unit.bits) for unit in harm.units) for pick in (min, max))
    return (least + 1.1 * share * (most - least)) / sum(unit.weights for unit in harm.units) + 1e-6


@settings(deadline=None, max_examples=60)
@given(harm=harms(), share=budgets)
def test_no_choice_within_the_budget_is_better(harm, share):
    budget = budget_at(harm, share)
    limit = budget * sum(unit.weights for unit in harm.units)
    best = min(
        sum(unit.kl[at] for unit, at in zip(harm.units, choice, strict=True))
        for choice in itertools.product(range(len(harm.formats)), repeat=len(harm.units))
        if sum(unit.bits[at] for unit, at in zip(harm.units, choice, strict=True)) <= limit
    )
    found = allocate(harm, budget=budget)
    assert bits_of(harm, found.formats) <= limit
    assert predicted(harm, found.formats) == pytest.approx(best, rel=1e-9, abs=1e-12)
    assert found.summary["predicted_kl_nats"] == pytest.approx(best, rel=1e-9, abs=1e-12)


@settings(deadline=None, max_examples=15)
@given(harm=harms(most=40), shares=st.lists(budgets, min_size=3, max_size=3))
def test_more_bits_never_harm_more_and_no_uniform_format_is_better(harm, shares):
    found = [allocate(harm, budget=budget_at(harm, share)).summary for share in sorted(shares)]
    for less, more in itertools.pairwise(found):
        assert more["predicted_kl_nats"] <= less["predicted_kl_nats"] * (1 + 1e-9) + 1e-12
    for summary in found:
        assert summary["bits"] <= summary["budget_bits"]
        for uniform in summary["uniform"].values():
            assert uniform["bits"] <= summary["budget_bits"]
            assert summary["predicted_kl_nats"] <= uniform["predicted_kl_nats"] * (1 + 1e-9) + 1e-12


def test_a_model_of_realistic_size_is_solved_exactly_by_dynamic_programming_too():
    generator = torch.Generator().manual_seed(0)
    sizes = [(3 * 576 * 576 // 2), 576 * 576, 2 * 576 * 1536, 576 * 1536] * 30
    base = (torch.randn(120, 1, generator=generator) * 1.5 - 6).exp()
    kl = (base * torch.tensor([0.004, 1.0, 30.0]) * (0.5 + torch.rand(120, 3, generator=generator))).double().tolist()
    harm = harm_of(kl, [[size * 33 // 4, size * 17 // 4, size * 9 // 4] for size in sizes], sizes)
    budget = 4.1
    found = allocate(harm, budget=budget)
    step = math.gcd(*(bit for unit in harm.units for bit in unit.bits))
    limit = int(budget * sum(sizes)) // step
    best = torch.full((limit + 1,), math.inf, dtype=torch.float64)
    best[0] = 0
    for unit in harm.units:
        following = torch.full_like(best, math.inf)
        for kl_of, bit in zip(unit.kl, unit.bits, strict=True):
            width = bit // step
            following[width:] = torch.minimum(following[width:], best[: limit + 1 - width] + kl_of)
        best = following
    assert found.summary["predicted_kl_nats"] == pytest.approx(float(best.min()), rel=1e-9)
    assert 0 < found.summary["units"]["int8"] < 120


def test_a_budget_below_the_smallest_is_refused_and_above_the_largest_binds_nothing():
    harm = harm_of([[0.01, 0.1, 0.4], [0.3, 0.2, 0.5]], [[825, 425, 225], [825, 425, 225]], [100, 100])
    with pytest.raises(ValueError, match=r"2 bits a weight is below the 2\.25 that the smallest of int8, int4, int2 take"):
        allocate(harm, budget=2)
    assert allocate(harm, budget=2.25).summary["units"] == {"int2": 2}
    free = allocate(harm, budget=8.25)
    assert free.formats == {"layer.0": INT8, "layer.1": INT4} and not free.summary["binds"]
    assert allocate(harm, budget=6.25).summary["binds"] is False and allocate(harm, budget=6.2).summary["binds"] is True
    with pytest.raises(ValueError, match="no unit"):
        allocate(Harm(THREE, ()), budget=4)


def test_formats_of_one_name_are_told_apart_in_what_is_said():
    coarse, fine = Format("int", 4, 64), Format("int", 4, 32)
    units = (Unit(("layer",), 100, (0.2, 0.1), (425, 450)),)
    assert set(allocate(Harm((coarse, fine), units), budget=5).summary["sensitivities"]["layer"]) == {"int4 g64", "int4 g32"}
    named = allocate(Harm((coarse, coarse._replace(symmetric=False)), units), budget=5).summary["sensitivities"]["layer"]
    assert len(named) == 2
