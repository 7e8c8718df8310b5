"""The walk through a model: what each stage sees, held against plain forwards of transformers with hooks."""

import threading

import pytest
import torch
from torch import nn

from assay.ops.models import experts, structure
from assay.ops.quantize.hessian import gather
from assay.ops.quantize.sequential import walk


def some(count: int = 5, length: int = 20, *, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 128, (count, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def seen_by_hooks(model, windows, names, **arguments):
    """What the named linear layers read in a plain forward: {name: [windows, length, in]}."""
    found = {}
    handles = [
        model.get_submodule(name).register_forward_pre_hook(lambda _, args, name=name: found.__setitem__(name, args[0])) for name in names
    ]
    model(input_ids=windows, use_cache=False, **arguments)
    for handle in handles:
        handle.remove()
    return found


def collected(stage):
    parts = {}
    for group, inputs in stage.inputs():
        parts.setdefault(group, []).append(inputs.clone())
    return {group: torch.cat(each) for group, each in parts.items()}


@pytest.mark.parametrize("true_sequential", [True, False])
@pytest.mark.parametrize("batch", [2, 8])
def test_a_walk_that_changes_nothing_sees_what_a_plain_forward_does(decoder, true_sequential, batch):
    windows = some()
    names = list(structure.block_linears(decoder))
    expected = seen_by_hooks(decoder, windows, names)
    reached = set()
    for stage in walk(decoder, windows, true_sequential=true_sequential, batch=batch):
        for group, inputs in collected(stage).items():
            reached |= set(group)
            for name in set(group) & set(names):
                wanted = expected[name].reshape(-1, expected[name].shape[-1])
                assert torch.allclose(inputs, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))
    assert reached == set(experts.weight_views(decoder))


def test_stages_come_in_the_order_of_the_computation_and_share_inputs(tl8):
    def short(group):
        return tuple(name.rpartition(".")[2] for name in group)

    stages = [(stage.block, [short(group) for group in stage.groups]) for stage in walk(tl8, some(2))]
    block = [[("q_proj", "k_proj", "v_proj")], [("o_proj",)], [("gate_proj", "up_proj")], [("down_proj",)]]
    assert stages == [(index, groups) for index in range(4) for groups in block]
    whole = [(stage.block, [short(group) for group in stage.groups]) for stage in walk(tl8, some(2), true_sequential=False)]
    assert whole == [(index, [group for groups in block for group in groups]) for index in range(4)]


@pytest.mark.parametrize("name", ["llama", "gemma3", "mixtral with a window"])
def test_each_stage_sees_what_the_changed_weights_before_it_give(make_decoder, name):
    model, windows = make_decoder(name), some()
    checked = 0
    for stage in walk(model, windows, batch=2):
        linears = [each for group in stage.groups for each in group if isinstance(model.get_submodule(each.rsplit(".", 2)[0]), nn.Module)]
        linears = [each for each in linears if each in structure.block_linears(model)]
        now = seen_by_hooks(model, windows, linears[:1])  # the model as it is: weights before this stage are changed already
        for group, inputs in collected(stage).items():
            if group[0] in now:
                wanted = now[group[0]].reshape(-1, inputs.shape[1])
                assert torch.allclose(inputs, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))
                checked += 1
        for weight in stage.weights.values():
            weight.mul_(0.7)
    assert checked == 4 * (2 if "mixtral" in name else 4)


def test_without_propagation_a_block_sees_what_the_unchanged_blocks_before_it_give(make_decoder):
    for true_sequential in (True, False):
        model, windows = make_decoder("llama"), some()
        expected = seen_by_hooks(model, windows, [f"model.layers.{block}.self_attn.q_proj" for block in range(4)])
        moved = 0
        for stage in walk(model, windows, propagate=False, true_sequential=true_sequential, batch=2):
            found = collected(stage)
            for group, inputs in found.items():
                if group[0] in expected:
                    assert torch.allclose(inputs, expected[group[0]].reshape(inputs.shape), rtol=1e-4, atol=1e-4)
                elif true_sequential and "o_proj" in group[0]:
                    moved += 1
            for weight in stage.weights.values():
                weight.mul_(0.7)
        assert moved == (4 if true_sequential else 0)


def test_as_one_stage_a_block_is_seen_as_it_was_and_its_norms_may_change_too(make_decoder):
    model, windows = make_decoder("llama"), some()
    for stage in walk(model, windows, true_sequential=False, batch=2):
        now = seen_by_hooks(model, windows, [group[0] for group in stage.groups])
        for group, inputs in collected(stage).items():
            assert torch.allclose(inputs, now[group[0]].reshape(inputs.shape), rtol=1e-4, atol=1e-3)
        with torch.no_grad():
            model.get_submodule(stage.name).input_layernorm.weight.mul_(1.5)
        for weight in stage.weights.values():
            weight.mul_(0.8)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", ["llama", "mistral with a window", "gemma3", "mixtral with a window"])
def test_pad_tokens_enter_no_statistic(make_decoder, name, side):
    model, lengths = make_decoder(name), (12, 5)
    texts = [some(1, length, seed=length)[0] for length in lengths]
    padded, real = torch.zeros(2, 12, dtype=torch.int64), torch.zeros(2, 12, dtype=torch.bool)
    for row, text in enumerate(texts):
        where = slice(0, len(text)) if side == "right" else slice(12 - len(text), 12)
        padded[row, where], real[row, where] = text, True
    together = {}
    for stage in walk(model, padded, real=real):
        together |= {group: (hessian.tokens, hessian.matrix()) for group, hessian in gather(stage).items()}
    sums = {}
    for text in texts:
        for stage in walk(model, text[None]):
            for group, hessian in gather(stage).items():
                tokens, total = sums.get(group, (0, 0))
                sums[group] = tokens + hessian.tokens, total + hessian.tokens * hessian.matrix()
    assert together.keys() == sums.keys()
    assert together[next(iter(together))][0] == 17
    for group, (tokens, matrix) in together.items():
        assert tokens == sums[group][0]
        assert torch.allclose(matrix, sums[group][1] / tokens, rtol=1e-4, atol=1e-5 * float(matrix.abs().max()))


def test_an_expert_sees_the_tokens_that_its_router_sends_to_it(make_decoder):
    model, windows = make_decoder("mixtral with a window"), some()
    routed, read = {}, {}
    handles = []
    for block in range(4):
        mixture = model.get_submodule(f"model.layers.{block}.mlp.experts")
        handles.append(mixture.register_forward_pre_hook(lambda _, args, block=block: routed.__setitem__(block, args[:2])))
    with torch.no_grad():
        model(input_ids=windows, use_cache=False)
    for handle in handles:
        handle.remove()
    for stage in walk(model, windows, batch=2):
        read |= collected(stage)
    views = experts.weights(model)
    for block, (hidden, chosen) in routed.items():
        for expert in range(4):
            name = f"model.layers.{block}.mlp.experts.{expert}"
            mine = hidden[(chosen == expert).any(dim=-1)]
            assert torch.allclose(read[f"{name}.gate_proj", f"{name}.up_proj"], mine, rtol=1e-4, atol=1e-4)
            inner = nn.functional.silu(mine @ views[f"{name}.gate_proj"].T) * (mine @ views[f"{name}.up_proj"].T)
            assert torch.allclose(read[(f"{name}.down_proj",)], inner, rtol=1e-4, atol=1e-4 * float(inner.abs().max()))


def test_a_module_can_be_run_again_as_its_block_calls_it(make_decoder):
    for name, true_sequential in (("gemma3", False), ("mistral with a window", True)):
        model, windows, real = make_decoder(name), some(4, 20), torch.ones(4, 20, dtype=torch.bool)
        real[0, 15:] = False
        for stage in walk(model, windows, real=real, true_sequential=true_sequential, batch=3):
            if stage.block != 1:
                continue
            module = model.get_submodule(f"{stage.name}.self_attn")
            outputs = []
            handle = module.register_forward_hook(lambda _, __, output, outputs=outputs: outputs.append(output[0]))
            with torch.no_grad():
                model(input_ids=windows, attention_mask=real.long(), use_cache=False)
            handle.remove()
            found = torch.cat([call.output() for call in stage.calls(f"{stage.name}.self_attn")])
            assert len(found) == 75
            assert torch.allclose(found, outputs[0].reshape(80, -1)[real.flatten()], rtol=1e-4, atol=1e-4)
            stage.weights[f"{stage.name}.self_attn.q_proj" if not true_sequential else stage.groups[0][0]].mul_(-3)
            again = torch.cat([call.output() for call in stage.calls(f"{stage.name}.self_attn")])
            assert (found - again).abs().max() > 1e-3 or "self_attn" not in stage.groups[0][0]
            with pytest.raises(ValueError, match="does not call"):
                list(stage.calls("model.layers.0.mlp"))


def test_a_walk_that_is_left_or_fails_leaves_no_hook_and_no_thread(tl8):
    windows, before = some(), threading.active_count()
    for stage in walk(tl8, windows, batch=1):
        if stage.block == 1:
            break
    with pytest.raises(RuntimeError, match="from the caller"):
        for _ in walk(tl8, windows, batch=1):
            raise RuntimeError("from the caller")

    def fail(*_):
        raise RuntimeError("from a module")

    handle = tl8.model.layers[2].mlp.act_fn.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="from a module"):
        list(walk(tl8, windows, batch=1))
    handle.remove()
    assert threading.active_count() == before
    assert not any(module._forward_pre_hooks for module in tl8.modules())
    assert not any("forward" in vars(module) for module in tl8.modules())


def test_nothing_to_walk_on_is_refused(tl8):
    with pytest.raises(ValueError, match="at least one window"):
        next(walk(tl8, torch.zeros(0, 4, dtype=torch.int64)))
    with pytest.raises(ValueError, match="no real token"):
        next(walk(tl8, some(2), real=torch.tensor([[True] * 20, [False] * 20])))
    with pytest.raises(ValueError, match="training mode"):
        next(walk(tl8.train(), some(2)))


def test_every_matrix_has_a_name_and_writing_into_it_changes_the_model(decoder, make_decoder):
    views = experts.weight_views(decoder)
    assert structure.coverage(decoder, experts.parameters(decoder, set(views))).share > 0.95
    assert all(view.weight.ndim == 2 for view in views.values())
    some_missing = set(views) - {next(reversed(views))}
    assert structure.coverage(decoder, experts.parameters(decoder, some_missing)).share < 1
    model = make_decoder("mixtral with a window")
    experts.weights(model)["model.layers.0.mlp.experts.3.up_proj"].fill_(7.0)
    mixture = model.model.layers[0].mlp.experts
    assert (mixture.gate_up_proj[3, 96:] == 7).all()
    assert not (mixture.gate_up_proj[3, :96] == 7).any()
    assert not (mixture.gate_up_proj[2] == 7).any()
