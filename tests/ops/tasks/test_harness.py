"""Our engine behind the harness's interface: the numbers of the harness's own model, whatever the batch, the sharing, the KV format or the draft."""

import math
from types import SimpleNamespace

import pytest

from assay.ops.tasks.harness import Drafting, EngineLM, Scored, generation, score
from assay.ops.tasks.until import Ending


def asked(*arguments: tuple) -> list:
    return [SimpleNamespace(args=each) for each in arguments]


@pytest.fixture(scope="module")
def checkpoint(make_llama, save_checkpoint_dir, tmp_path_factory):
    return save_checkpoint_dir(make_llama(vocab=101), tmp_path_factory.mktemp("h") / "tl8")


def open_lm(directory, **more) -> EngineLM:
    from transformers import AutoTokenizer

    from assay.kernels.engine import open_runner

    return EngineLM(open_runner(directory), AutoTokenizer.from_pretrained(directory), **{"max_length": 2048, "eos_ids": [2], **more})


@pytest.fixture(scope="module")
def lm(checkpoint):
    return open_lm(checkpoint, batch=3)


@pytest.fixture(scope="module")
def hflm(checkpoint):
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=str(checkpoint), dtype="float32", device="cpu", batch_size=3)


QUESTIONS = asked(
    ("Question: one\nAnswer:", " yes"), ("Question: one\nAnswer:", " yesterday"), ("Question: one\nAnswer:", " n"),
    ("Two, longer than the first: what comes next of all this? ", "no"), ("Two, longer than the first: what comes next of all this? ", "never"),
    ("", "empty context"), ("", "e"), ("a", "b"), ("Question: one\nAnswer:", " yes"),
    ("x" * 50, "y" * 40), ("x" * 50, "y" * 40 + "z"), ("x" * 50, "z"), ("trailing   ", "spaces"),
)  # fmt: skip
TEXTS = asked(("one text",), ("another, somewhat longer, text",), ("x",))


def same(found, expected) -> None:
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], abs=1e-4)


def test_loglikelihoods_are_those_of_the_harness_s_own_model(lm, hflm):
    same(lm.loglikelihood(QUESTIONS), hflm.loglikelihood(QUESTIONS, disable_tqdm=True))


def test_a_greedy_continuation_is_told_as_greedy(lm):
    contexts = ["Question: one\nAnswer:", "another", "x", "ab ab"]
    texts = lm.generate_until(asked(*((context, {"until": [], "max_gen_toks": 4}) for context in contexts)))
    pairs = [(context, text) for context, text in zip(contexts, texts, strict=True) if len(text) == 4]
    found = lm.loglikelihood(asked(*pairs, *((context, text[:-1] + "\n") for context, text in pairs)))
    assert [greedy for _, greedy in found] == [True] * len(pairs) + [text[-1] == "\n" for _, text in pairs] and pairs


def test_too_long_texts_lose_their_beginning_as_in_the_harness_and_are_counted(checkpoint, hflm, monkeypatch):
    short = open_lm(checkpoint, max_length=20, batch=4)
    monkeypatch.setattr(hflm, "_max_length", 20)
    questions = asked(("w" * 30, " end"), ("w" * 30, " x"), ("short", " end"), ("w" * 16, " end"), ("w" * 17, " end"), ("w" * 18, " end"))
    same(short.loglikelihood(questions), hflm.loglikelihood(questions, disable_tqdm=True))
    assert short.truncated == 3  # 17 and 4 tokens are 20 to read and the last one to predict
    with pytest.raises(ValueError, match="a continuation of 21 tokens"):
        short.loglikelihood(asked(("a", "b" * 21)))


def test_rolling_loglikelihoods_are_those_of_the_harness_with_and_without_windows(checkpoint, lm, hflm, monkeypatch):
    assert lm.loglikelihood_rolling(TEXTS) == pytest.approx(hflm.loglikelihood_rolling(TEXTS, disable_tqdm=True), abs=1e-4)
    monkeypatch.setattr(hflm, "_max_length", 7)
    assert open_lm(checkpoint, max_length=7).loglikelihood_rolling(TEXTS) == pytest.approx(
        hflm.loglikelihood_rolling(TEXTS, disable_tqdm=True), abs=1e-4
    )


@pytest.mark.parametrize("batch", [1, 2, 16])
def test_e05_e02_scores_do_not_depend_on_the_batch(checkpoint, lm, batch):
    other = open_lm(checkpoint, batch=batch)
    same(other.loglikelihood(QUESTIONS), lm.loglikelihood(QUESTIONS))
    assert other.loglikelihood_rolling(TEXTS) == pytest.approx(lm.loglikelihood_rolling(TEXTS), abs=1e-5)
    texts = asked(*((context, {"until": ["\n"], "max_gen_toks": 6}) for context, _ in (each.args for each in QUESTIONS)))
    assert other.generate_until(texts) == lm.generate_until(texts)


def test_e05_every_family_scores_alike_alone_and_in_a_batch(decoder):
    """Shared beginnings and turns are one by one again, for windows, biases, norms of heads and experts."""
    from assay.ops.decode.forward import TorchRunner
    from assay.ops.decode.weights import weights_of

    texts = [[3, 4, 5, 6, 7, 8], [3, 4, 5, 9], [3, 4, 5, 6, 10, 11, 12], [20, 21], [*range(30, 70), 5], [*range(30, 70), 6, 7]]
    scored = [Scored(number, text[:-1], text[-min(2, len(text) - 1) :]) for number, text in enumerate(texts)]
    runner = TorchRunner(*weights_of(decoder))
    alone = [score(runner, [each], batch=1, kv_format=None)[0] for each in scored]
    same(score(runner, scored, batch=4, kv_format=None), alone)


def test_a_common_prompt_is_read_once_and_logits_are_made_of_scored_places_alone(lm):
    """Three options of one prompt, two prompts with a beginning in common: what the runner is given, token by token."""
    seen = []
    forward = lm.runner.forward

    def watched(cache, step):
        seen.append((len(step.ids), len(step.keep)))
        return forward(cache, step)

    beginning = list(range(3, 23))
    texts = [
        Scored(0, [*beginning, 30, 31, 40], [40, 41]), Scored(1, [*beginning, 30, 31, 50, 51], [50, 51, 52]), Scored(2, [*beginning, 30, 31], [60]),
        Scored(3, [*beginning, 35, 70], [70, 71]), Scored(4, [*beginning, 35], [80]),
    ]  # fmt: skip
    lm.runner.forward = watched
    try:
        together = score(lm.runner, texts, batch=2, kv_format=None)
    finally:
        del lm.runner.forward
    # 20 shared; 30 31 and 35, whose last places are asked about; then one token of the first options, two of the second, none of the third.
    assert seen == [(20, 0), (3, 2), (2, 2), (2, 2)]
    same(together, [score(lm.runner, [each], batch=1, kv_format=None)[0] for each in texts])


@pytest.mark.parametrize("kv_format", ["int8", "fp8_e4m3"])
def test_a_kv_format_changes_the_scores_and_not_much(checkpoint, lm, kv_format):
    plain = [value for value, _ in lm.loglikelihood(QUESTIONS)]
    stored = [value for value, _ in open_lm(checkpoint, kv_format=kv_format).loglikelihood(QUESTIONS)]
    assert stored != plain and stored == pytest.approx(plain, rel=0.5)


@pytest.mark.parametrize(("template", "adds"), [(True, True), (True, False), (False, True), (False, False)])
def test_e01_there_is_one_bos_where_template_or_tokenizer_writes_it(checkpoint, template, adds):
    from tokenizers.processors import TemplateProcessing

    lm = open_lm(checkpoint)
    lm.tokenizer.chat_template = "{{ bos_token }}{% for each in messages %}{{ each.content }}{% endfor %}" if template else None
    if adds:
        lm.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    text = "hello"
    if template:
        text = lm.apply_chat_template([{"role": "user", "content": text}])
    else:
        with pytest.raises(ValueError, match="chat: false"):
            lm.apply_chat_template([{"role": "user", "content": text}])
    lm.loglikelihood(asked((text, " you")))
    assert lm.first_ids.count(1) == int(template or adds) and lm.tok_encode(text).count(1) == int(template or adds)
    assert lm.first_ids[template or adds] != 1


def test_greedy_texts_are_those_of_the_harness_s_own_model_up_to_their_stops(lm, hflm):
    texts = asked(
        ("Question: one\nAnswer:", {"until": ["\n\n", "q"], "max_gen_toks": 24}), ("another", {"until": ["zz"], "max_gen_toks": 24}),
        ("x", {"until": ["\n\n", "q"], "max_gen_toks": 24}), ("a longer prompt than that", {"until": ["e", "a"], "max_gen_toks": 24, "do_sample": False}),
    )  # fmt: skip
    assert lm.generate_until(texts) == hflm.generate_until(texts, disable_tqdm=True)


def test_e08_a_stop_is_a_whole_string_in_a_list(lm):
    with pytest.raises(ValueError, match=r"until='Question'; expected a list of whole strings, such as until: \['Question'\]"):
        generation({"until": "Question"})
    tokenizer = lm.tokenizer

    def after(text: str, *stops: str) -> Ending:
        return Ending(tokenizer, stops, 128, [2], tokenizer.encode(text))

    assert not after("Identify the Question first", "\n\nQuestion").finished
    assert after("so it is\n\nQuestion", "\n\nQuestion").finished
    assert after("so it is\n\nQuestion: more", "\n\nQuestion", "it is\n\n").text() == "so "
    ended = after("yes", "no")
    ended.advance(2)
    assert ended.finished and ended.text() == "yes"


def test_e08_texts_that_end_by_their_length_are_counted(checkpoint):
    lm = open_lm(checkpoint, eos_ids=[])
    stop = lm.generate_until(asked(("ab", {"until": [], "max_gen_toks": 3})))[0][-1]
    before = lm.cut
    lm.generate_until(
        asked(("ab", {"until": [stop], "max_gen_toks": 8}), *((text, {"until": [], "max_gen_toks": 2}) for text in ("a", "b", "ab")))
    )
    assert (before, lm.cut) == (1, 4)


@pytest.mark.parametrize("method", ["ngram", "model"])
def test_with_a_draft_greedy_texts_are_the_same(checkpoint, lm, make_llama, save_checkpoint_dir, tmp_path, method):
    from assay.kernels.engine import open_runner
    from assay.ops.decode.drafts import ModelDraft, NGramDraft

    small = None if method == "ngram" else save_checkpoint_dir(make_llama(vocab=101, layers=1), tmp_path / "draft")
    draft = NGramDraft(2) if small is None else ModelDraft(open_runner(small))
    texts = asked(
        *((text, {"until": ["\n", "qu"], "max_gen_toks": count}) for text in ("one", "two, longer", "ab ab ab ab") for count in (1, 12))
    )
    drafted = open_lm(checkpoint, drafting=Drafting(draft, 3), batch=2)
    assert drafted.generate_until(texts) == lm.generate_until(texts)


def test_draws_are_a_request_s_own(checkpoint):
    def texts(batch: int, seed: int, **more) -> list[str]:
        arguments = {"until": ["\n"], "max_gen_toks": 8, "do_sample": True, "temperature": 1.5, **more}
        return open_lm(checkpoint, batch=batch, seed=seed).generate_until(asked(*[("one prompt", arguments)] * 4))

    assert len(set(texts(4, 0))) > 1
    assert texts(4, 0) == texts(1, 0) == texts(3, 0) != texts(4, 1)
    assert len(set(texts(4, 0, top_k=1))) == 1


def test_what_generation_arguments_mean():
    greedy = generation({"until": ["\n", ""], "temperature": 0.7, "do_sample": False})
    assert greedy[0].greedy and greedy[1:] == (("\n",), 256)
    sampling, stops, count = generation({"temperature": 0.7, "top_p": 0.9, "top_k": 5, "max_new_tokens": 3})
    assert (sampling.temperature, sampling.top_p, sampling.top_k, stops, count) == (0.7, 0.9, 5, (), 3)
    assert generation({"do_sample": True})[0].temperature == 1 and generation({"num_beams": 1})[0].greedy
    with pytest.raises(ValueError, match="'guidance_scale' is not understood; there are until"):
        generation({"guidance_scale": 2})
    with pytest.raises(ValueError, match="num_beams is more than 1"):
        generation({"num_beams": 4})
    with pytest.raises(ValueError, match="asks for no token"):
        generation({"max_gen_toks": 0})


def test_a_prompt_without_room_for_its_answer_is_refused_and_a_long_one_is_cut_from_the_left(checkpoint):
    lm = open_lm(checkpoint, max_length=12)
    with pytest.raises(ValueError, match="12 new tokens leave no room"):
        lm.generate_until(asked(("a", {"max_gen_toks": 12})))
    long, end = lm.generate_until(asked(("abcdefghijklm", {"max_gen_toks": 4}), ("fghijklm", {"max_gen_toks": 4})))
    assert long == end and lm.truncated == 1


def test_scores_that_are_not_finite_are_an_error_and_no_number(lm, monkeypatch):
    forward = lm.runner.forward
    monkeypatch.setattr(lm.runner, "forward", lambda cache, step: forward(cache, step) * math.nan, raising=False)
    with pytest.raises(ValueError, match="NaN"):
        lm.loglikelihood(asked(("a", "b")))
