"""Fewer experts: what nobody was sent to can go, and what is alike can be one."""

import copy

import pytest
import torch
from transformers import DynamicCache, Qwen3MoeConfig, Qwen3MoeForCausalLM

from assay.ops.models.checkpoint import load_model, save_checkpoint
from assay.ops.prune.experts import drop_experts, merge_experts, usage
from assay.ops.prune.width_scores import choose

IDS = torch.arange(3, 43).unsqueeze(0)
LARGEST = 8  # experts


def qwen3_moe(**config):
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=128, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, num_experts=LARGEST, num_experts_per_tok=2, mlp_only_layers=[2], **{"norm_topk_prob": True, **config},
        )
    )  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, 0.16)
        model.model.embed_tokens.weight.normal_(0, 1)
    return model.eval()


@pytest.fixture(params=["mixtral", "qwen3_moe"])
def mixture(request, make_decoder):
    """Eight experts, of which a token takes two."""
    return make_decoder("mixtral with a window", num_local_experts=LARGEST) if request.param == "mixtral" else qwen3_moe()


@pytest.fixture
def windows():
    return torch.randint(3, 128, (6, 14), generator=torch.Generator().manual_seed(1))


def blocks_of(model):
    return [block.mlp for block in model.model.layers if hasattr(block.mlp, "experts")]


@torch.no_grad()
def logits(model, ids=IDS):
    return model(ids, use_cache=False).logits


@torch.no_grad()
def reference(model, windows):
    """By another way: tokens and saliency [mixtures, experts], mean outputs; from the inputs of each mixture, one token and expert at a time."""
    read = {}
    hooks = [part.register_forward_pre_hook(lambda module, args: read.update({module: args[0].flatten(0, 1)})) for part in blocks_of(model)]
    model(windows, use_cache=False)
    for hook in hooks:
        hook.remove()
    tokens, sums, means = (torch.zeros(len(read), LARGEST, *more, dtype=torch.float64) for more in ((), (), (64,)))
    for row, part in enumerate(blocks_of(model)):
        for x in read[part]:
            probabilities = torch.softmax(part.gate.weight @ x, dim=0)
            top = probabilities.topk(2).indices.tolist()
            for expert in range(LARGEST):
                gate, up = (part.experts.gate_up_proj[expert] @ x).chunk(2)
                out = part.experts.down_proj[expert] @ (torch.nn.functional.silu(gate) * up)
                means[row, expert] += out / len(read[part])
                if expert in top:
                    tokens[row, expert] += 1
                    sums[row, expert] += probabilities[expert] / probabilities[top].sum() * out.norm()
    return tokens.long(), sums / tokens.clamp(min=1), means


def test_usage_is_that_of_every_token_and_expert_computed_one_by_one(mixture, windows):
    found = usage(mixture, windows, outputs=True)
    tokens, saliency, means = reference(mixture, windows)
    assert found.tokens.equal(tokens) and int(found.tokens.sum()) == len(tokens) * 6 * 14 * 2
    torch.testing.assert_close(found.saliency, saliency, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found.outputs, means, rtol=1e-4, atol=1e-6)
    without = usage(mixture, windows)
    assert without.outputs is None and without.tokens.equal(tokens)
    torch.testing.assert_close(without.saliency, saliency, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_not_counted(mixture, side):
    texts = [torch.randint(3, 128, (1, length), generator=torch.Generator().manual_seed(length)) for length in (12, 5)]
    padded, real = torch.zeros(2, 12, dtype=torch.long), torch.zeros(2, 12, dtype=torch.bool)
    for row, text in enumerate(texts):
        place = slice(12 - text.shape[1], None) if side == "left" else slice(0, text.shape[1])
        padded[row, place], real[row, place] = text[0], True
    alone = [usage(mixture, text) for text in texts]
    together = usage(mixture, padded, real=real)
    assert together.tokens.equal(alone[0].tokens + alone[1].tokens)


def test_dropping_experts_that_no_token_is_sent_to_changes_no_logit_and_the_rest_reopens(mixture, tmp_path):
    text = IDS[:, :2]  # two tokens reach four experts of eight at most, other ones in each block
    used = usage(mixture, text)
    kept = choose(used.tokens, 4)
    assert len({tuple(each) for each in kept}) > 1
    before = logits(mixture, text)
    router = blocks_of(mixture)[1].gate.weight[kept[1]].clone()
    drop_experts(mixture, kept)
    torch.testing.assert_close(logits(mixture, text), before, atol=1e-5, rtol=0)
    assert blocks_of(mixture)[1].gate.weight.equal(router)
    after = logits(mixture)
    save_checkpoint(mixture, None, tmp_path)
    reopened = load_model(tmp_path)
    assert reopened.config.to_dict().get("num_local_experts", reopened.config.to_dict().get("num_experts")) == 4
    torch.testing.assert_close(logits(reopened), after, atol=1e-5, rtol=0)
    cache = DynamicCache(config=reopened.config)
    with torch.no_grad():
        steps = [reopened(IDS[:, at : at + 1], cache=cache, use_cache=True).logits for at in range(IDS.shape[1])]
    torch.testing.assert_close(torch.cat(steps, dim=1), after, atol=1e-4, rtol=0)


def test_a_router_that_does_not_normalise_its_choice_gives_those_that_stay_more():
    model, text = qwen3_moe(norm_topk_prob=False), IDS[:, :2]
    before = logits(model, text)
    drop_experts(model, choose(usage(model, text).tokens, 4))
    assert (logits(model, text) - before).abs().max() > 1e-3


@torch.no_grad()
def test_an_expert_that_says_nothing_is_least_salient_though_it_is_asked_most(mixture, windows):
    for part in blocks_of(mixture):
        most = int(usage(mixture, windows).tokens[0].argmax())
        part.experts.down_proj[most] = 0
    used = usage(mixture, windows)
    for row, part in enumerate(blocks_of(mixture)):
        (silent,) = [expert for expert in range(LARGEST) if not part.experts.down_proj[expert].any()]
        assert used.saliency[row, silent] == 0 and silent not in choose(used.saliency, 7)[row]


@torch.no_grad()
def test_merging_an_expert_into_its_shuffled_copy_gives_the_copy(mixture, windows):
    for part in blocks_of(mixture):  # expert 5 is expert 1 with its inner channels in another order
        inner = part.experts.down_proj.shape[-1]
        order = torch.randperm(inner, generator=torch.Generator().manual_seed(1))
        part.experts.gate_up_proj[5] = part.experts.gate_up_proj[1][torch.cat([order, inner + order])]
        part.experts.down_proj[5] = part.experts.down_proj[1][:, order]
    kept = [[0, 1, 2, 3, 4, 6, 7]] * len(blocks_of(mixture))
    used = usage(mixture, windows, outputs=True)
    dropped, merged, unaligned = (copy.deepcopy(mixture) for _ in range(3))
    drop_experts(dropped, kept)
    merge_experts(merged, kept, used)
    merge_experts(unaligned, kept, used, align=False)
    for before, after, blurred in zip(blocks_of(dropped), blocks_of(merged), blocks_of(unaligned), strict=True):
        torch.testing.assert_close(after.experts.gate_up_proj, before.experts.gate_up_proj, atol=1e-6, rtol=0)
        torch.testing.assert_close(after.experts.down_proj, before.experts.down_proj, atol=1e-6, rtol=0)
        assert after.gate.weight.equal(before.gate.weight)
        assert (blurred.experts.down_proj[1] - before.experts.down_proj[1]).abs().max() > 0.1
        assert blurred.experts.down_proj[0].equal(before.experts.down_proj[0])  # into which nothing went


@torch.no_grad()
def test_merged_weights_are_averages_by_tokens_into_the_nearest_that_stays(mixture, windows):
    used = usage(mixture, windows, outputs=True)
    weights = [part.experts.down_proj.clone() for part in blocks_of(mixture)]
    merge_experts(mixture, [[2, 6]] * len(weights), used, align=False)
    for row, (before, part) in enumerate(zip(weights, blocks_of(mixture), strict=True)):
        outputs, tokens = used.outputs[row], used.tokens[row].double()
        groups = {2: [2], 6: [6]}
        for expert in (0, 1, 3, 4, 5, 7):
            groups[2 if (outputs[expert] - outputs[2]).norm() <= (outputs[expert] - outputs[6]).norm() else 6].append(expert)
        for place, (_, group) in enumerate(sorted(groups.items())):
            shares = tokens[group] / tokens[group].sum()
            expected = sum(float(share) * before[each] for share, each in zip(shares, group, strict=True))
            torch.testing.assert_close(part.experts.down_proj[place], expected, atol=1e-5, rtol=0)


def test_what_cannot_be_dropped_or_watched_is_refused_and_the_model_left_as_it_was(mixture, tl8, windows):
    before, rows = logits(mixture), len(blocks_of(mixture))
    for kept, message in (
        ([[0]] * rows, rf"{rows} lists of one length were expected, 2 to 8, since a token is sent to 2"),
        ([[0, 1]] * (rows - 1), "lists of one length"),
        ([[0, 1]] * (rows - 1) + [[0, 1, 2]], "lists of one length"),
        ([[0, 8]] * rows, r"experts \[0, 8\] of 8: each is a number from 0 to 7, given once"),
        ([[3, 3]] * rows, "given once"),
    ):
        with pytest.raises(ValueError, match=message):
            drop_experts(mixture, kept)
    with pytest.raises(ValueError, match=rf"usage of \[{rows}, 8\] experts without outputs"):
        merge_experts(mixture, [[0, 1]] * rows, usage(mixture, windows))
    assert logits(mixture).equal(before)
    with pytest.raises(ValueError, match="LlamaForCausalLM has no mixture"):
        usage(tl8, windows)
    with pytest.raises(ValueError, match=r"shape \[0, 14\]"):
        usage(mixture, windows[:0])
    with pytest.raises(ValueError, match=r"training mode.*model\.eval"):
        usage(mixture.train(), windows)
