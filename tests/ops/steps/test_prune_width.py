"""The steps ``prune_width``, ``prune_experts`` and the scores of ``prune_depth``, as an experiment meets them: plain checkpoints of the size that was asked for."""

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

from assay.ops.models.checkpoint import load_model
from assay.ops.models.structure import shape_numbers
from assay.schemas.pruning import PruneDepth, PruneExperts, PruneWidth
from assay.schemas.rounding import Quantize


@pytest.fixture(scope="module")
def grouped(make_llama, save_checkpoint_dir, tmp_path_factory):
    """Six query heads in three groups."""
    return save_checkpoint_dir(make_llama(layers=2, hidden=96, heads=6, kv_heads=3), tmp_path_factory.mktemp("grouped") / "parent")


@pytest.mark.parametrize(
    ("asked", "sizes"),
    [
        ({"kv_groups": 2}, {"heads": 4, "kv_heads": 2}), ({"heads_per_group": 1}, {"heads": 3, "kv_heads": 3}),
        ({"kv_groups": 2, "heads_per_group": 1}, {"heads": 2, "kv_heads": 2}), ({"ffn": 40}, {"intermediate_size": 40}),
        ({"hidden": 48}, {"hidden_size": 48}), ({"hidden": 48, "ffn": 40, "kv_groups": 2}, {"hidden_size": 48, "intermediate_size": 40, "heads": 4, "kv_heads": 2}),
        ({"hidden": 48, "correct_norms": False}, {"hidden_size": 48}),
        *(({"heads_per_group": 1, "heads_by": by, "cut": "most"}, {"heads": 3}) for by in ("retrieval", "induction", "sink", "random")),
        ({"heads_per_group": 1, "protect": 1}, {"heads": 3}),
    ],
    ids=str,
)  # fmt: skip
def test_a_plain_checkpoint_of_the_widths_that_were_asked_for(asked, sizes, done, grouped, ids, engine, close):
    made = done(PruneWidth(**asked), grouped)
    opened = AutoModelForCausalLM.from_pretrained(made.out, dtype=torch.float32).eval()
    before = shape_numbers(load_model(grouped))
    assert shape_numbers(opened) == made.summary["after"] == before | sizes
    with torch.no_grad():
        assert close(engine(made.out), opened(ids).logits[0])


def test_protected_heads_stay_and_too_many_are_refused(done, grouped):
    made = done(PruneWidth(heads_per_group=1, protect=1), grouped)
    assert {tuple(each) for each in made.summary["protected"]} <= {
        (layer, head) for layer, row in enumerate(made.summary["query_heads"]) for head in row
    }
    with pytest.raises(ValueError, match="protect"):
        done(PruneWidth(heads_per_group=1, protect=12), grouped, "again")


def test_what_is_narrower_is_rounded_by_its_own_widths(done, grouped):
    narrow = done(PruneWidth(hidden=48), grouped, "narrow").out
    assert done(Quantize(format="int4", group_size=16), narrow).summary["bits_per_weight"] > 4
    with pytest.raises(ValueError, match="group_size=32 does not divide the 48 columns"):
        done(Quantize(format="int4", group_size=32), narrow, "wide")


@pytest.mark.parametrize("method", ["frequency", "output_norm", "merge"])
def test_a_mixture_of_fewer_experts_opens_and_runs(method, done, save_checkpoint_dir, tmp_path, ids):
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=128, hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, num_local_experts=4
    )  # fmt: skip
    parent = save_checkpoint_dir(MixtralForCausalLM(config), tmp_path / "mixture")
    made = done(PruneExperts(experts=3, method=method), parent)
    opened = AutoModelForCausalLM.from_pretrained(made.out, dtype=torch.float32)
    assert opened.config.num_local_experts == 3 and [len(row) for row in made.summary["kept"]] == [3] * opened.config.num_hidden_layers
    assert opened(ids).logits.isfinite().all()


@pytest.mark.parametrize("score", ["perplexity", "random", "angular"])
def test_every_score_takes_out_so_many_blocks(score, done, small):
    made = done(PruneDepth(layers=1, score=score), small)
    assert len(made.summary["removed"]) == 1 and load_model(made.out).config.num_hidden_layers == 1
    assert made.summary["score"] == score


def test_the_blocks_that_are_named_go(done, make_llama, save_checkpoint_dir, tmp_path):
    parent = save_checkpoint_dir(make_llama(layers=4), tmp_path / "named")
    made = done(PruneDepth(layers=2, score="listed", listed=(0, 3)), parent)
    assert made.summary["removed"] == [0, 3]
    first, second = (load_model(where).base_model.layers for where in (parent, made.out))
    assert second[0].mlp.up_proj.weight.equal(first[1].mlp.up_proj.weight) and second[1].mlp.up_proj.weight.equal(
        first[2].mlp.up_proj.weight
    )


def test_the_control_follows_the_seed(done, make_llama, save_checkpoint_dir, tmp_path):
    parent = save_checkpoint_dir(make_llama(layers=4), tmp_path / "four")
    removed = [done(PruneDepth(layers=2, score="random"), parent, f"seed{seed}", seed=seed).summary["removed"] for seed in range(6)]
    assert len({tuple(each) for each in removed}) > 1
    assert done(PruneDepth(layers=2, score="random"), parent, "again", seed=3).summary["removed"] == removed[3]


def test_a_hidden_size_that_no_config_takes_is_refused_before_anything_is_ranked(done, grouped, monkeypatch):
    from assay.ops.prune import width_scores

    monkeypatch.setattr(width_scores, "importance", lambda *args, **more: pytest.fail("ranked"))
    with pytest.raises(ValueError, match="cannot be reopened"):
        done(PruneWidth(hidden=50), grouped)
