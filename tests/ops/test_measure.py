"""Protocols applied to tiny checkpoints, end to end: each suite's rows, and what it refuses."""

import json

import pytest
import torch

from assay.ops.measure import measure
from assay.ops.suites import subject as module
from assay.ops.suites.divergence import _base_head, reference
from assay.ops.suites.subject import DraftOf, Subject
from assay.schemas.metrics import METRICS
from assay.schemas.protocols import Acceptance, Bytes, Divergence, Speculation, Speed
from assay.schemas.pruning import PruneDepth
from assay.schemas.rounding import Quantize
from assay.schemas.sampling import SamplingSpec
from assay.schemas.texts import Text

ROW = {"metric", "slice_kind", "slice", "value", "unit", "n", "standard_error", "status", "message", "threads", "path", "other_cpu_share"}


@pytest.fixture
def experiment_dir(tmp_path):
    """Two languages, some digits and code; no sentence twice in a row."""
    lines = [
        {"text": f"In {1900 + index} x = f({index}); they said nothing new about it.", "language": ["en", "de"][index % 2]}
        for index in range(200)
    ]
    (tmp_path / "text.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return tmp_path


@pytest.fixture
def base(tl8_dir):
    for loaded in (module.model_of, module.tokenizer_of, _base_head):
        loaded.cache_clear()
    return tl8_dir


TEXT = Text(path="text.jsonl")
DIVERGENCE = Divergence(text=TEXT, tokens=300, window=64, stride=48, batch=4)


def applied(step, parent, out):
    from assay.ops.apply import apply

    out.mkdir()
    apply(step, parent, out, windows=torch.randint(3, 98, (2, 32), generator=torch.Generator().manual_seed(0)))
    return out


def values(result, slice="all"):
    return {row["metric"]: row["value"] for row in result.metrics if row["slice"] == slice}


def checked(result, protocol):
    """Every row has the keys of a fact, and every metric is one that the suite says it measures."""
    assert all(set(row) == ROW for row in result.metrics)
    assert {row["metric"] for row in result.metrics} <= set(METRICS[protocol.suite])
    json.dumps([result.metrics, result.items, result.notes], allow_nan=False)
    return values(result)


def test_the_reference_holds_what_a_variant_is_compared_by(base, tmp_path, experiment_dir):
    from safetensors.torch import load_file

    told = reference(DIVERGENCE, base, tmp_path / "ref", experiment_dir=experiment_dir)
    stored = load_file(tmp_path / "ref" / "reference.safetensors")
    assert (told["tokens"], told["targets"], told["bos"]) == (300, 299, None)
    assert stored["hidden"].shape == (299, 64) and stored["window"].unique().tolist() == list(range(told["windows"]))
    model = module.model_of(base, "float32")
    with torch.inference_mode():
        first = model(input_ids=stored["ids"][None, :64]).logits[0, :-1].log_softmax(dim=-1)
    assert torch.allclose(stored["nll"][:63], -first.gather(1, stored["ids"][1:64, None]).flatten(), atol=1e-4)
    assert torch.allclose(stored["entropy"][:63], -(first.exp() * first).sum(dim=-1), atol=1e-4)
    assert stored["top"][:63].equal(first.argmax(dim=-1))


def test_the_base_against_its_own_reference_is_the_noise_of_the_engine(base, tmp_path, experiment_dir):
    reference(DIVERGENCE, base, tmp_path / "ref", experiment_dir=experiment_dir)
    result = measure(DIVERGENCE, Subject(base, None, None, base), reference=tmp_path / "ref", experiment_dir=experiment_dir)
    found = checked(result, DIVERGENCE)
    assert set(found) == set(METRICS["divergence"])
    assert abs(found["self_kl_nats"]) < 1e-7 and found["self_kl_nats"] == found["kl_mean_nats"]
    assert found["top1_agreement"] == 1 and abs(found["perplexity_delta"]) < 1e-3
    assert result.notes["batch"] != DIVERGENCE.batch and result.notes["targets"] == 299


@pytest.mark.parametrize("batch", [1, 3, 16])
def test_the_kl_of_a_variant_is_that_of_plain_logits_in_any_batch(base, tmp_path, experiment_dir, batch):
    """Windows of different lengths share a batch here, so pads would show."""
    from safetensors.torch import load_file

    protocol = DIVERGENCE.model_copy(update={"batch": batch})
    reference(protocol, base, tmp_path / "ref", experiment_dir=experiment_dir)
    variant = applied(PruneDepth(layers=1), base, tmp_path / "variant")
    found = checked(
        measure(protocol, Subject(variant, None, None, base), reference=tmp_path / "ref", experiment_dir=experiment_dir), protocol
    )
    ids = load_file(tmp_path / "ref" / "reference.safetensors")["ids"]
    kl, nll = [], []
    for start, stop, first in json.loads((tmp_path / "ref" / "reference.json").read_text())["cover"]:
        with torch.inference_mode():
            p, q = (
                module.model_of(each, "float32")(input_ids=ids[None, start:stop])
                .logits[0, first - 1 - start : -1]
                .double()
                .log_softmax(dim=-1)
                for each in (base, variant)
            )
        kl.append((p.exp() * (p - q)).sum(dim=-1))
        nll.append(-q.gather(1, ids[first:stop, None]).flatten())
    kl, nll = torch.cat(kl), torch.cat(nll)
    assert len(kl) == 299
    assert found["kl_mean_nats"] == pytest.approx(float(kl.mean()), rel=1e-4)
    assert found["kl_max_nats"] == pytest.approx(float(kl.max()), rel=1e-4)
    assert found["perplexity"] == pytest.approx(float(nll.mean().exp()), rel=1e-4)
    assert found["kl_mean_nats"] > 0.1 and "self_kl_nats" not in found


def test_divergence_is_sliced_by_class_and_language_and_drawn(base, tmp_path, experiment_dir):
    reference(DIVERGENCE, base, tmp_path / "ref", experiment_dir=experiment_dir)
    variant = applied(Quantize(format="int4", group_size=32), base, tmp_path / "variant")
    result = measure(DIVERGENCE, Subject(variant, None, None, base), reference=tmp_path / "ref", experiment_dir=experiment_dir)
    slices = {(row["slice_kind"], row["slice"]) for row in result.metrics}
    assert slices == {("all", "all"), ("language", "en"), ("language", "de")} | {
        ("token_class", name) for name in ("digits", "code_symbols", "word_start", "other")
    }
    assert {row["path"] for row in result.metrics} == {"dequantized"}
    assert result.pictures["kl_histogram"].startswith(b"\x89PNG") and sum(result.notes["histogram"]["tokens"]) == 299
    assert {item["metric"] for item in result.items} == {"kl_mean_nats", "nll_mean_nats"} and len(result.items) == 2 * result.notes[
        "windows"
    ]


def test_a_quantized_cache_diverges_and_a_draft_does_not(base, tmp_path, experiment_dir):
    reference(DIVERGENCE, base, tmp_path / "ref", experiment_dir=experiment_dir)
    cached, drafted = (
        values(measure(DIVERGENCE, Subject(base, kv, draft, base), reference=tmp_path / "ref", experiment_dir=experiment_dir))[
            "kl_mean_nats"
        ]
        for kv, draft in (("int8", None), (None, DraftOf("ngram", 4, 3, None, None)))
    )
    assert cached > 1e-5 and abs(drafted) < 1e-7


def test_a_variant_with_another_vocabulary_or_without_a_reference_is_refused(base, tmp_path, experiment_dir):
    from transformers import AutoTokenizer

    reference(DIVERGENCE, base, tmp_path / "ref", experiment_dir=experiment_dir)
    variant = applied(PruneDepth(layers=1), base, tmp_path / "variant")
    tokenizer = AutoTokenizer.from_pretrained(variant)
    tokenizer.add_tokens(["extra"])
    tokenizer.save_pretrained(variant)
    with pytest.raises(ValueError, match="other tokens than the base's"):
        measure(DIVERGENCE, Subject(variant, None, None, base), reference=tmp_path / "ref", experiment_dir=experiment_dir)
    with pytest.raises(ValueError, match=r"ops\.measure\.reference"):
        measure(DIVERGENCE, Subject(base, None, None, base), reference=None, experiment_dir=experiment_dir)


def test_bytes_count_the_draft_and_the_cache_apart(base, tmp_path):
    small = applied(Quantize(format="int4", group_size=32), base, tmp_path / "small")
    alone = checked(measure(Bytes(), Subject(small, None, None, base), reference=None, experiment_dir=None), Bytes())
    assert alone["draft_bytes"] == 0 and alone["size_bytes"] == alone["weight_bytes"] and alone["quantized_bits_per_weight"] == 4.5
    assert alone["kv_bytes_per_token"] == 2 * 4 * 2 * 16 * 2
    drafted = Subject(base, "int8", DraftOf("variant", 3, None, small, "fp8_e4m3"), base)
    found = checked(measure(Bytes(), drafted, reference=None, experiment_dir=None), Bytes())
    assert found["draft_bytes"] == alone["weight_bytes"] and found["size_bytes"] == found["weight_bytes"] + found["draft_bytes"]
    assert found["kv_bytes_per_token"] == 2 * 4 * 2 * (16 + 2) and found["draft_kv_bytes_per_token"] == 2 * 4 * 2 * 16
    ngram = values(measure(Bytes(), Subject(base, None, DraftOf("ngram", 4, 3, None, None), base), reference=None, experiment_dir=None))
    assert ngram["draft_bytes"] == 0 and "draft_kv_bytes_per_token" not in ngram and "quantized_bits_per_weight" not in ngram
    assert (
        values(measure(Bytes(), Subject(base, None, DraftOf("variant", 3, None, base, None), base), reference=None, experiment_dir=None))[
            "draft_bytes"
        ]
        == 0
    )


ACCEPTANCE = Acceptance(text=TEXT, prompts=3, prompt_tokens=16, new_tokens=20)


@pytest.mark.parametrize("draft", [DraftOf("ngram", 4, 3, None, None), "same", "pruned"])
@pytest.mark.parametrize("kv", [None, "int8"])
def test_greedy_speculation_gives_the_tokens_of_plain_decoding(base, tmp_path, experiment_dir, draft, kv):
    if draft == "same":
        draft = DraftOf("variant", 4, None, base, kv)
    elif draft == "pruned":
        draft = DraftOf("variant", 4, None, applied(PruneDepth(layers=1), base, tmp_path / "draft"), None)
    result = measure(ACCEPTANCE, Subject(base, kv, draft, base), reference=None, experiment_dir=experiment_dir)
    found = checked(result, ACCEPTANCE)
    assert found["greedy_mismatches"] == 0 and result.notes["near_ties"] == 0
    positions = [row for row in result.metrics if row["slice_kind"] == "position"]
    assert [row["slice"] for row in positions] == ["1", "2", "3", "4"]
    assert all(row["n"] <= positions[0]["n"] for row in positions)
    if draft[3] == base:  # the target drafts for itself: all is accepted, five tokens a round but for the last
        assert found["acceptance_rate"] == 1 and 4 < found["tokens_per_round"] <= 5


def test_a_wrong_verification_would_be_counted(base, experiment_dir, monkeypatch):
    """The check can fail: a loop that emits another token than plain decoding is caught."""
    from assay.ops.decode import speculate

    right = speculate.speculative_generate

    def wrong(*arguments, **settings):
        done = right(*arguments, **settings)
        return [each._replace(tokens=[(each.tokens[0] + 1) % 97, *each.tokens[1:]]) for each in done]

    monkeypatch.setattr(speculate, "speculative_generate", wrong)
    result = measure(
        ACCEPTANCE, Subject(base, None, DraftOf("ngram", 4, 3, None, None), base), reference=None, experiment_dir=experiment_dir
    )
    assert values(result)["greedy_mismatches"] == 3 and [each["position"] for each in result.notes["parted"]] == [0, 0, 0]


def test_sampled_speculation_has_rates_and_no_mismatches(base, experiment_dir):
    protocol = ACCEPTANCE.model_copy(update={"sampling": SamplingSpec(temperature=1.0)})
    subject = Subject(base, None, DraftOf("variant", 2, None, base, None), base)
    first, again = (checked(measure(protocol, subject, reference=None, experiment_dir=experiment_dir), protocol) for _ in range(2))
    assert "greedy_mismatches" not in first and first == again
    assert first["acceptance_rate"] > 0.95


def test_proposals_that_adapt_are_as_exact_and_fewer_where_little_is_accepted(base, experiment_dir):
    fixed, adapted = (
        measure(
            ACCEPTANCE, Subject(base, None, DraftOf("ngram", 8, 1, None, None, *more), base), reference=None, experiment_dir=experiment_dir
        )
        for more in ((), (0.3,))
    )
    assert values(adapted)["greedy_mismatches"] == 0
    proposed = [next(row["n"] for row in result.metrics if row["metric"] == "acceptance_rate") for result in (fixed, adapted)]
    assert 0 < proposed[1] < proposed[0]


def test_acceptance_is_the_overlap_within_what_chance_allows(base, tmp_path, experiment_dir):
    draft = applied(PruneDepth(layers=1), base, tmp_path / "draft")
    protocol = ACCEPTANCE.model_copy(update={"sampling": SamplingSpec(temperature=1.0), "prompts": 12, "new_tokens": 40})
    result = measure(
        protocol, Subject(base, None, DraftOf("variant", 3, None, draft, None), base), reference=None, experiment_dir=experiment_dir
    )
    found = checked(result, protocol)
    row = next(row for row in result.metrics if row["metric"] == "acceptance_minus_expected")
    assert found["acceptance_when_reached"] - found["expected_acceptance"] == pytest.approx(row["value"], abs=1e-9)
    assert 0 < row["standard_error"] < 0.1 and abs(row["value"]) < 4 * row["standard_error"]


def test_a_copy_prompt_begins_its_passage_again(base, experiment_dir):
    (passage, *_), (copy, *_) = (
        module.prompts_of(ACCEPTANCE.model_copy(update={"prompt": kind}), module.tokenizer_of(base), 2, 15, experiment_dir)
        for kind in ("passage", "copy")
    )
    assert copy == [*passage[:10], *passage[:5]]


def test_a_draft_that_proposes_nothing_has_no_rate(base, tmp_path):
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "abcdefgh"}))
    protocol = ACCEPTANCE.model_copy(update={"prompts": 1, "prompt_tokens": 8, "new_tokens": 2})
    result = measure(protocol, Subject(base, None, DraftOf("ngram", 1, 1, None, None), base), reference=None, experiment_dir=tmp_path)
    row = next(row for row in result.metrics if row["metric"] == "acceptance_rate")
    assert row["value"] is None and row["status"] == "not_finite" and row["message"] == "no token was proposed" and row["n"] == 0


def test_acceptance_without_a_draft_is_refused(base, experiment_dir):
    with pytest.raises(ValueError, match="this one has none"):
        measure(ACCEPTANCE, Subject(base, None, None, base), reference=None, experiment_dir=experiment_dir)


SPEED = Speed(text=TEXT, prompt_tokens=8, prefill_tokens=32, new_tokens=6, repeats=2)


def test_speed_has_prefill_and_decode_apart_with_what_disturbed_them(base, experiment_dir):
    protocol = SPEED.model_copy(update={"batch": 2})
    result = measure(protocol, Subject(base, "int8", None, base), reference=None, experiment_dir=experiment_dir)
    found = checked(result, protocol)
    assert set(found) == {"prefill_tok_s", "decode_tok_s", "peak_rss_bytes"}
    seconds = result.notes["seconds"]["decode_tok_s"]
    assert found["decode_tok_s"] == pytest.approx(2 * 5 / (sum(seconds) / 2))
    timed = [row for row in result.metrics if row["unit"] == "tok/s"]
    assert all(row["n"] == 2 and row["threads"] >= 1 and row["path"].endswith("weights") for row in timed)
    assert all(row["other_cpu_share"] is None or 0 <= row["other_cpu_share"] <= 1 for row in timed)  # none: over before the system counted
    assert all(row["status"] in ("ok", "noisy") for row in timed)
    assert 2**26 < found["peak_rss_bytes"] < 2**36


def test_speed_of_a_draft_is_taken_with_and_without_it(base, experiment_dir):
    result = measure(SPEED, Subject(base, None, DraftOf("ngram", 3, 2, None, None), base), reference=None, experiment_dir=experiment_dir)
    assert set(checked(result, SPEED)) == {"prefill_tok_s", "decode_tok_s", "decode_no_draft_tok_s", "peak_rss_bytes"}


def test_what_a_speedup_is_made_of(base, experiment_dir):
    protocol = Speculation(text=TEXT, prompt="copy", prompt_tokens=12, new_tokens=9, batches=(1, 2), repeats=2)
    result = measure(
        protocol, Subject(base, "int8", DraftOf("variant", 3, None, base, None), base), reference=None, experiment_dir=experiment_dir
    )
    found = checked(result, protocol)
    assert found["draft_cost_ratio"] > 0 and found["verify_cost_ratio"] > 0 and 1 <= found["best_gamma"] <= 16
    assert result.notes["alpha"] == 1 and result.notes["gamma"] == 3  # it drafts for itself
    assert found["predicted_speedup"] == pytest.approx(4 / (3 * found["draft_cost_ratio"] + 1))
    by_batch = {row["slice"]: row["value"] for row in result.metrics if row["slice_kind"] == "batch"}
    assert set(by_batch) == {"1", "2"} and found["measured_speedup"] == by_batch["1"]
    losing = [int(batch) for batch, gain in by_batch.items() if gain <= 1]
    row = next(row for row in result.metrics if row["metric"] == "break_even_batch")
    assert row["value"] == (losing[0] if losing else None) and (losing or "still pays at 2" in row["message"])


def test_protocols_of_one_variant_share_a_loaded_model(base, experiment_dir, monkeypatch):
    from assay.kernels import engine

    loads, load = [], engine.open_runner
    monkeypatch.setattr(engine, "open_runner", lambda directory, **options: loads.append(directory) or load(directory, **options))
    for protocol in (SPEED, ACCEPTANCE):
        measure(protocol, Subject(base, None, DraftOf("ngram", 3, 2, None, None), base), reference=None, experiment_dir=experiment_dir)
    assert loads == [base]
