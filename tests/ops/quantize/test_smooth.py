"""Scales moved between producers and readers."""

from contextlib import contextmanager

import pytest
import torch

from assay.ops.quantize.activations import watch_inputs
from assay.ops.quantize.smooth import KINDS, channel_maxima, fold, pairs, smooth, tensors

IDS = torch.arange(3, 103).view(5, 20)
FAMILIES = [
    "llama",
    "llama with yarn, bias and one key head",
    "mistral with a window",
    "qwen2 with a bias",
    "qwen3",
    "gemma3",
    "mixtral with a window",
]


def some_scales(pair, model, seed=0):
    count = tensors(model)[pair.readers[0]].shape[1] // pair.repeats
    return torch.rand(count, generator=torch.Generator().manual_seed(seed)) * 3 + 0.3


def logits(model, ids=IDS):
    with torch.no_grad():
        return model(ids).logits


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_folding_any_pair_of_any_family_leaves_logits_and_routing_as_they_were(make_decoder, family, kind):
    model = make_decoder(family)
    before = logits(model)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    routers = [name for name, _ in model.named_modules() if name.endswith("mlp.gate")]
    with router_logits(model, routers) as unfolded:
        logits(model)
    for index, pair in enumerate(pairs(model, [kind])):
        fold(model, pair, some_scales(pair, model, index))
    with router_logits(model, routers) as folded:
        after = logits(model)
    assert torch.allclose(after, before, atol=1e-4, rtol=1e-4)
    changed = sum(not torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    assert changed >= 2 * len(model.model.layers)
    assert len(folded) == len(routers) == (4 if "mixtral" in family else 0)
    assert all(torch.allclose(folded[name], unfolded[name], atol=1e-4) for name in routers)


@contextmanager
def router_logits(model, routers):
    found, handles = {}, []
    for name in routers:

        def keep(_module, _arguments, output, name=name):
            found[name] = output[0]

        handles.append(model.get_submodule(name).register_forward_hook(keep))
    yield found
    for handle in handles:
        handle.remove()


def test_the_pairs_of_a_llama_and_of_a_mixture(make_decoder, tl8):
    block = "model.layers.0"
    found = {pair.name: pair for pair in pairs(tl8) if pair.name.startswith(block)}
    assert list(found) == [f"{block}.norm_qkv", f"{block}.v_o", f"{block}.norm_mlp", f"{block}.mlp.up_down"]
    assert found[f"{block}.norm_qkv"].readers == tuple(f"{block}.self_attn.{part}_proj" for part in "qkv")
    assert (found[f"{block}.v_o"].repeats, found[f"{block}.v_o"].run) == (2, 16)
    mixtral = make_decoder("mixtral with a window")
    (norm,) = [pair for pair in pairs(mixtral, ["norm_mlp"]) if pair.name.startswith(block)]
    assert set(norm.readers) == {f"{block}.mlp.gate"} | {f"{block}.mlp.experts.{e}.{p}_proj" for e in range(4) for p in ("gate", "up")}
    assert len([pair for pair in pairs(mixtral, ["up_down"]) if pair.name.startswith(block)]) == 4
    gemma = make_decoder("gemma3")
    assert {pair.producer for pair in pairs(gemma, ["norm_mlp"])} == {f"model.layers.{i}.pre_feedforward_layernorm" for i in range(4)}


def test_leaving_a_reader_out_changes_the_model(make_decoder):
    """What the test above would miss if the fold did nothing: one router forgotten is a large error."""
    model = make_decoder("mixtral with a window")
    before = logits(model)
    (pair, *_) = pairs(model, ["norm_mlp"])
    fold(model, pair._replace(readers=tuple(name for name in pair.readers if not name.endswith("mlp.gate"))), some_scales(pair, model))
    assert (logits(model) - before).abs().max() > 0.05


def test_a_norm_that_multiplies_by_one_more_than_its_weight_is_folded(make_decoder):
    gemma = make_decoder("gemma3")
    before = logits(gemma)
    (pair, *_) = pairs(gemma, ["norm_qkv"])
    scales = some_scales(pair, gemma)
    weight = gemma.model.layers[0].input_layernorm.weight
    expected = (1 + weight.detach()) / scales - 1
    fold(gemma, pair, scales)
    assert torch.allclose(weight, expected, atol=1e-6) and torch.allclose(logits(gemma), before, atol=1e-4)


def test_scales_of_value_channels_are_shared_by_the_query_heads_of_a_key_head(tl8):
    (pair, *_) = pairs(tl8, ["v_o"])
    assert pair.spread(torch.arange(32.0)).tolist() == [*range(16), *range(16), *range(16, 32), *range(16, 32)]
    assert pair.gather(torch.arange(64.0), "max").tolist() == [*range(16, 32), *range(48, 64)]
    with pytest.raises(ValueError, match="64 scales do not fit readers of 64 channels"):
        fold(tl8, pair, torch.ones(64))


def test_smoothquant_worked_by_hand(tl8):
    pair = pairs(tl8, ["norm_qkv"])[1]
    attention = tl8.model.layers[1].self_attn
    seen = []
    watch_inputs(tl8, [f"{pair.parent}.q_proj"], IDS, lambda _, values: seen.append(values))
    largest = torch.cat(seen).abs().amax(0)
    weights = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]).abs().amax(0).detach()
    before = logits(tl8)
    found = smooth(tl8, IDS, alpha={"norm_qkv": 0.75, "norm_mlp": 0.5, "model.layers.2.norm_qkv": 0.0})
    assert torch.allclose(found[pair.name], largest**0.75 / weights**0.25, rtol=1e-4)
    assert set(found) == {f"model.layers.{i}.{kind}" for i in range(4) for kind in ("norm_qkv", "norm_mlp")}
    assert torch.allclose(logits(tl8), before, atol=2e-4, rtol=1e-4)
    two = tl8.model.layers[2].self_attn  # with α = 0 every column of the readers has the same largest weight
    evened = torch.cat([two.q_proj.weight, two.k_proj.weight, two.v_proj.weight]).abs().amax(0)
    assert torch.allclose(evened, torch.ones(64), rtol=1e-4)


@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_outlier_channels_are_smaller_after_smoothing(tl8, alpha):
    with torch.no_grad():
        tl8.model.layers[1].input_layernorm.weight[[5, 9]] = 80.0
    (pair,) = [pair for pair in pairs(tl8, ["norm_qkv"]) if pair.name.startswith("model.layers.1.")]
    before = channel_maxima(tl8, [pair], IDS)[pair.name]
    smooth(tl8, IDS, alpha=alpha)
    after = channel_maxima(tl8, [pair], IDS)[pair.name]
    assert before.max() / before.median() > 30 and after.max() / after.median() < (10 if alpha == 0.5 else 1.001)


@pytest.mark.parametrize("family", ["llama", "mixtral with a window"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_pad_tokens_enter_no_maximum(make_decoder, family, side):
    model = make_decoder(family)
    with torch.no_grad():
        model.model.embed_tokens.weight[0] *= 50  # the pad token
    long, short = IDS[0, :12], IDS[1, :5]
    ids, real = torch.zeros(2, 12, dtype=torch.long), torch.zeros(2, 12, dtype=torch.bool)
    at = slice(7, 12) if side == "left" else slice(0, 5)
    ids[0], real[0], ids[1, at], real[1, at] = long, True, short, True
    found = channel_maxima(model, pairs(model), ids, real=real)
    alone = [channel_maxima(model, pairs(model), text[None]) for text in (long, short)]
    for name, maximum in found.items():
        each = torch.stack([one[name] for one in alone if name in one]).amax(0)
        assert torch.allclose(maximum, each, rtol=1e-4, atol=1e-5), name
    assert set(found) == set(alone[0]) | set(alone[1])


def test_channels_that_are_always_zero_and_weights_of_zero_keep_everything_finite(tl8):
    with torch.no_grad():
        tl8.model.layers[0].input_layernorm.weight[3] = 0
        for part in ("q_proj", "k_proj", "v_proj"):
            getattr(tl8.model.layers[1].self_attn, part).weight[:, 7] = 0
    before = logits(tl8)
    found = smooth(tl8, IDS, kinds=KINDS)
    assert all(scales.isfinite().all() and (scales > 0).all() for scales in found.values())
    assert found["model.layers.0.norm_qkv"][3] == 1 and found["model.layers.1.norm_qkv"][7] == 1
    assert torch.allclose(logits(tl8), before, atol=3e-4, rtol=1e-4)


def test_smoothing_a_mixture_scales_all_experts_and_the_router_and_leaves_experts_without_tokens(make_decoder):
    model = make_decoder("mixtral with a window")
    before = logits(model)
    found = smooth(model, IDS, kinds=KINDS)
    assert torch.allclose(logits(model), before, atol=1e-4, rtol=1e-4)
    one_token = smooth(model, IDS[:1, :1], kinds=["up_down"])
    assert len(one_token) == 8  # two of four experts in each of four blocks
    assert len([name for name in found if "experts" in name]) == 16


def test_what_cannot_be_smoothed_is_refused_and_leaves_the_model(tl8):
    before = {name: tensor.clone() for name, tensor in tl8.state_dict().items()}
    for alpha, said in ((1.5, "norm_qkv is 1.5"), ({"norm_qkv": 0.5}, r"model\.layers\.0\.norm_mlp is missing")):
        with pytest.raises(ValueError, match=f"alpha of .*{said}"):
            smooth(tl8, IDS, alpha=alpha)
    with pytest.raises(ValueError, match="at least one window"):
        smooth(tl8, IDS[:0])
    with pytest.raises(ValueError, match="'gate_down' is not known"):
        pairs(tl8, ["gate_down"])
    with pytest.raises(ValueError, match="1 of 64 scales are not positive"):
        fold(tl8, pairs(tl8)[0], torch.ones(64).index_fill(0, torch.tensor([4]), 0.0))
    del tl8.model.layers[2].post_attention_layernorm
    with pytest.raises(ValueError, match=r"model\.layers\.2 of LlamaForCausalLM has no post_attention_layernorm"):
        pairs(tl8)
    assert all(torch.equal(tensor, before[name]) for name, tensor in tl8.state_dict().items())
