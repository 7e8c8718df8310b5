"""The suite on a tiny checkpoint whose head is wider than its tokenizer: its numbers against full forwards, and what it refuses and leaves empty."""

import json
import math
import random
from itertools import product

import pytest
import torch

from assay.ops.measure import measure
from assay.ops.suites import constrained as module
from assay.ops.suites import subject as opening
from assay.ops.suites.subject import DraftOf, Subject
from assay.schemas.metrics import METRICS
from assay.schemas.protocols import Constrained, ConstrainedPrompt

ROW = {"metric", "slice_kind", "slice", "value", "unit", "n", "standard_error", "status", "message", "threads", "path", "other_cpu_share"}
ENUM = '{"enum": ["no", "not", "note"]}'


@pytest.fixture
def base(tl8_dir):
    opening.model_of.cache_clear()
    opening.tokenizer_of.cache_clear()
    return tl8_dir


@pytest.fixture
def flat_dir(make_llama, save_checkpoint_dir, tmp_path):
    """A model whose weights say little, so that no text is out of reach."""
    opening.tokenizer_of.cache_clear()
    model = make_llama(layers=1)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.02)
    return save_checkpoint_dir(model, tmp_path / "flat")


def asked(*prompts, **options):
    return Constrained(prompts=tuple(ConstrainedPrompt(**prompt) for prompt in prompts), **options)


def run(protocol, directory, *, kv=None, draft=None):
    result = measure(protocol, Subject(directory, kv, draft, directory), reference=None, experiment_dir=None)
    assert all(set(row) == ROW for row in result.metrics) and {row["metric"] for row in result.metrics} <= set(METRICS["constrained"])
    assert all("float32" in row["path"] for row in result.metrics)
    json.dumps([result.metrics, result.items, result.notes], allow_nan=False)
    return result


def values(result):
    return {row["metric"]: row["value"] for row in result.metrics}


def full_forward(directory, ids):
    """Log-probabilities of the next token over the tokenizer's ids, without cache or engine."""
    model, tokenizer = opening.model_of(directory, "float32"), opening.tokenizer_of(directory)
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids])).logits[0, -1, : len(tokenizer)].double().log_softmax(dim=-1)


def test_the_numbers_are_those_of_full_forwards_and_ids_beyond_the_tokenizer_have_no_chance(base):
    tokenizer = opening.tokenizer_of(base)
    prompt, eos = tokenizer("Say it:")["input_ids"], 2
    assert len(tokenizer) == 101
    texts = ["A", "B", "AB", "BB"]  # [AB]|[AB]B
    p, p_mask = {}, {}
    for text in texts:
        ids = [*tokenizer(text)["input_ids"], eos]
        log_p = log_mask = 0.0
        for at, token in enumerate(ids):
            row = full_forward(base, prompt + ids[:at])
            legal = [tokenizer.convert_tokens_to_ids(letter) for letter in ("AB", "B", "")[at]] + ([eos] if at else [])
            log_p += float(row[token])
            log_mask += float(row[token] - row[legal].logsumexp(0))
        p[text], p_mask[text] = math.exp(log_p), math.exp(log_mask)
    z = sum(p.values())
    result = run(asked({"prompt": "Say it:", "regex": "[AB]B?", "expected": "AB"}), base)
    found = values(result)
    assert set(found) == set(METRICS["constrained"])
    assert found["log_legal_mass_nats"] == pytest.approx(math.log(z), abs=1e-3)
    assert found["constrained_tv"] == pytest.approx(sum(abs(p_mask[text] - p[text] / z) for text in texts) / 2, abs=1e-3)
    assert found["constrained_kl_nats"] == pytest.approx(
        sum(p_mask[text] * math.log(p_mask[text] * z / p[text]) for text in texts), abs=2e-3
    )
    assert found["masked_accuracy"] == pytest.approx(p_mask["AB"], abs=1e-3)
    assert found["conditional_accuracy"] == pytest.approx(p["AB"] / z, abs=1e-3)
    assert (found["dead_end_share"], found["unfinished_share"]) == (0, 0)
    assert result.notes["prompts"][0]["exact"] and result.notes["prompts"][0]["texts"] == 4
    assert {(item["item"], item["metric"]): item["value"] for item in result.items} == {(0, name): value for name, value in found.items()}


def test_draws_agree_with_the_enumeration(flat_dir):
    question = {"prompt": "Which?", "regex": "(a|bc|bd)e?", "expected": "a"}
    exact = values(run(asked(question), flat_dir))
    result = run(asked(question, exact_prefixes=0, samples=600), flat_dir)
    drawn = values(result)
    assert not result.notes["prompts"][0]["exact"]
    for name, near in (("constrained_tv", 0.05), ("log_legal_mass_nats", 0.1), ("effective_sample_share", 0.08), ("masked_accuracy", 0.06)):
        assert drawn[name] == pytest.approx(exact[name], abs=near), name
    assert exact["constrained_tv"] > 0.01 and drawn["greedy_agreement"] == exact["greedy_agreement"]
    assert values(run(asked(question, exact_prefixes=0, samples=600), flat_dir)) == drawn


def test_several_prompts_are_averaged_and_each_is_an_item(flat_dir):
    questions = [{"prompt": f"{index}?", "regex": "[AB]", **({"expected": "A"} if index else {})} for index in range(3)]
    result = run(asked(*questions), flat_dir)
    rows = {row["metric"]: row for row in result.metrics}
    each = [item["value"] for item in result.items if item["metric"] == "constrained_tv"]
    assert rows["constrained_tv"]["n"] == 3 and rows["constrained_tv"]["value"] == pytest.approx(sum(each) / 3)
    assert rows["constrained_tv"]["standard_error"] == pytest.approx(float(torch.tensor(each).std()) / math.sqrt(3), rel=1e-3)
    assert rows["free_accuracy"]["n"] == 2 and rows["constrained_kl_nats"]["unit"] == "nats" and rows["constrained_tv"]["unit"] == "1"


def test_a_temperature_is_of_both_distributions(flat_dir):
    question = {"prompt": "x", "regex": "[AB]B?"}
    cold, warm = (values(run(asked(question, temperature=t), flat_dir))["log_legal_mass_nats"] for t in (0.1, 1.0))
    assert cold != pytest.approx(warm, abs=0.1)


@pytest.mark.parametrize("empty", [{"regex": r"a[^\s\S]"}, {"json_schema": '{"enum": []}'}])
def test_an_empty_language_is_refused_before_any_weight_is_read(base, empty):
    (base / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"admits no text|nsatisfiable") as caught:
        run(asked({"prompt": "fine", "regex": "a"}, {"prompt": "impossible", **empty}), base)
    assert type(caught.value).__name__ == "DeadEnd" and "prompt 1, 'impossible'" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("prompt", "options", "says"),
    [
        ({"regex": "a(?=b)"}, {}, "cannot be followed"),
        ({"json_schema": '{"not": {}}'}, {}, "not"),
        ({"regex": "a"}, {"template": "chat"}, "no chat template"),
    ],
)
def test_what_cannot_be_asked_is_refused_before_any_weight_is_read(base, prompt, options, says):
    (base / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=says) as caught:
        run(asked({"prompt": "x", **prompt}, **options), base)
    assert "prompt 0" in caught.value.__notes__[0]


def test_an_answer_that_never_ends_in_time_has_a_status_and_no_number(base):
    result = run(asked({"prompt": "On and on", "regex": "[a-z ]*x{40}", "expected": "x"}, samples=4, max_new_tokens=6), base)
    rows = {row["metric"]: row for row in result.metrics}
    for name in ("constrained_tv", "constrained_kl_nats", "log_legal_mass_nats", "masked_accuracy"):
        assert (rows[name]["value"], rows[name]["status"], rows[name]["n"]) == (None, "not_finite", 0)
        assert "max_new_tokens" in rows[name]["message"]
    assert rows["unfinished_share"]["value"] == 1 and rows["dead_end_share"]["value"] == 0
    assert {item["value"] for item in result.items if item["metric"] == "constrained_tv"} == {None}


def test_one_endless_answer_leaves_the_numbers_of_the_others(flat_dir):
    both = asked({"prompt": "x", "regex": "a{40}"}, {"prompt": "y", "regex": "[AB]"}, samples=2, max_new_tokens=4)
    rows = {row["metric"]: row for row in run(both, flat_dir).metrics}
    assert rows["constrained_tv"]["value"] is not None and rows["constrained_tv"]["n"] == 1
    assert "1 of 2 prompts" in rows["constrained_tv"]["message"] and rows["unfinished_share"]["value"] == 0.5


def test_distances_that_rest_on_few_draws_are_noisy_and_others_are_not(base):
    question = {"prompt": "Say it:", "regex": "[AB]B?", "expected": "A"}
    noisy, exact = (
        {row["metric"]: row for row in run(asked(question, **more), base).metrics} for more in ({"exact_prefixes": 0, "samples": 3}, {})
    )
    for name in ("constrained_tv", "log_legal_mass_nats", "conditional_accuracy"):
        assert noisy[name]["status"] == "noisy" and "raise samples" in noisy[name]["message"]
    assert noisy["masked_accuracy"]["status"] == noisy["greedy_agreement"]["status"] == "ok"
    assert {row["status"] for row in exact.values()} == {"ok"}


def test_a_dead_end_makes_the_divergence_infinite_and_is_counted(base):
    """The tokenizer has no letter beyond ASCII: after a nothing can follow."""
    result = run(asked({"prompt": "x", "regex": "aé|b"}), base)
    rows = {row["metric"]: row for row in result.metrics}
    assert rows["dead_end_share"]["value"] > 0 and rows["constrained_tv"]["value"] >= rows["dead_end_share"]["value"] - 1e-9
    assert rows["constrained_kl_nats"]["value"] is None and "dead end" in rows["constrained_kl_nats"]["message"]


def test_an_enum_with_a_common_prefix_has_each_of_its_texts(flat_dir):
    result = run(asked({"prompt": "x", "json_schema": ENUM, "expected": "note"}), flat_dir)
    assert result.notes["prompts"][0]["texts"] == 3 and json.loads(result.notes["prompts"][0]["greedy"]["constrained"]) in (
        "no",
        "not",
        "note",
    )


def test_the_greedy_answers_are_those_of_full_forwards(base):
    tokenizer, eos = opening.tokenizer_of(base), 2
    result = run(asked({"prompt": "Say it:", "regex": "[AB]B?"}, max_new_tokens=5), base)
    said = result.notes["prompts"][0]["greedy"]
    ids = tokenizer("Say it:")["input_ids"]
    free = []
    while len(free) < 5 and (not free or free[-1] != eos):
        free.append(int(full_forward(base, ids + free).argmax()))
    assert said["free"] == tokenizer.decode([token for token in free if token != eos], skip_special_tokens=True)
    first = max("AB", key=lambda letter: full_forward(base, ids)[tokenizer.convert_tokens_to_ids(letter)])
    assert said["constrained"].startswith(first)
    assert values(result)["greedy_agreement"] == float(said["free"] == said["constrained"])


def test_a_quantized_cache_is_used_and_a_draft_is_not(base):
    question = asked({"prompt": "Say it:", "regex": "[AB]B?"})
    plain, cached, drafted = (
        values(run(question, base, kv=kv, draft=draft))
        for kv, draft in ((None, None), ("int8", None), (None, DraftOf("ngram", 4, 3, None, None)))
    )
    assert cached != plain == drafted


def test_continuations_are_those_of_full_forwards_in_any_number_and_order(base):
    prompt = [5, 17, 90, 3, 44]
    asked_for = module.continuations(module.runner_of(base, "float32"), prompt, longest=40, kv_format=None)
    texts = [(), *product((7, 8), repeat=4), (9,) * 40, (), (7,), tuple(range(3, 36))]
    random.Random(0).shuffle(texts)
    logits = asked_for(texts)
    model = opening.model_of(base, "float32")
    for text, row in zip(texts, logits, strict=True):
        with torch.inference_mode():
            assert torch.allclose(row, model(input_ids=torch.tensor([[*prompt, *text]])).logits[0, -1], atol=1e-3)
    assert torch.equal(asked_for([(7, 8)])[0], asked_for([(7, 8)])[0])


def test_the_built_in_questions_can_all_be_asked(base):
    from assay.ops.data.questions import QUESTIONS
    from assay.ops.decode.constraints import from_json_schema, from_regex
    from assay.ops.evaluate.constrained import says

    tokenizer = opening.tokenizer_of(base)
    for question in QUESTIONS:
        settings = {"head_size": 128, "eos_ids": [2]}
        if question.regex:
            text, answer = from_regex(tokenizer, question.regex, **settings), question.expected
        else:
            text, answer = (
                from_json_schema(tokenizer, json.loads(question.json_schema), **settings),
                json.dumps({"city": question.expected, "european": True}),
            )
        for token in [*tokenizer(answer)["input_ids"], 2]:
            text.advance(token)
        assert text.finished and says(answer, question.expected)
    assert run(Constrained(samples=2, exact_prefixes=16, max_new_tokens=4), base).notes["prompts"][0]["prompt"] == QUESTIONS[0].prompt


@pytest.mark.parametrize(
    ("text", "expected", "right"),
    [
        ("yes.", "Yes", True),
        ("Yesterday", "Yes", False),
        ("a dog", "A", False),
        ("(A)", "A", True),
        ("42", "4", False),
        ('{"city": "Rome"}', "rome", True),
        ("", "no", False),
    ],
)
def test_an_answer_is_right_where_it_has_the_expected_words(text, expected, right):
    from assay.ops.evaluate.constrained import says

    assert says(text, expected) == right
