"""Answers side by side: stops that are whole strings, rows that do not know each other, one beginning-of-sequence token."""

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from assay.ops.decode.forward import TorchRunner
from assay.ops.decode.generate import generate
from assay.ops.decode.sampling import Sampling
from assay.ops.decode.weights import weights_of
from assay.ops.models.checkpoint import load_tokenizer
from assay.ops.tasks.generated_answers import Answer, draw_answers, prompt_ids, require_positions

WARM = Sampling(0.9)
PROMPTS = ["Say: one", "Say: two, and then some more of it, far beyond what the others have to say", "Say: x"]


def generator_of(prompt, sample):
    return torch.Generator().manual_seed(100 * prompt + sample)


@pytest.fixture
def opened(make_llama, save_checkpoint_dir, tmp_path):
    model = make_llama(layers=2)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.15)
    directory = save_checkpoint_dir(model, tmp_path / "base")
    return TorchRunner(*weights_of(model)), load_tokenizer(directory), directory


def ids(tokenizer, texts=PROMPTS):
    return [tokenizer(text)["input_ids"] for text in texts]


@pytest.fixture
def scripted(monkeypatch):
    """What the model says to each prompt, a character a token."""

    def script(tokenizer, said):
        def next_tokens(logits, requests, sampling):
            assert len(logits) == len(requests)
            found = []
            for request in requests:
                text = said[tokenizer.decode(request.text[: request.start])]
                at = len(request.emitted)
                found.append(tokenizer(text[at])["input_ids"][0] if at < len(text) else tokenizer.eos_token_id)
            return found

        monkeypatch.setattr("assay.ops.decode.generate.next_tokens", next_tokens)

    return script


def draw(opened, prompts, **more):
    runner, tokenizer, _ = opened
    settings = {"sampling": Sampling(), "max_new_tokens": 60, "eos_ids": {tokenizer.eos_token_id}, **more}
    return draw_answers(runner, tokenizer, ids(tokenizer, prompts), **settings)


def test_a_stop_is_a_whole_string_and_not_its_words(opened, scripted):
    """Trap E08: the word of a stop inside an answer cuts nothing; the stop ends it wherever it comes, and is not part of it."""
    said = {"a": "Identify the Question first: 4\n\nQuestion: and so on", "b": "4\nQuestion", "c": "Question: 4"}
    scripted(opened[1], said)
    found = [answer for (answer,) in draw(opened, list(said), stops=["\n\nQuestion", "ZZ"])]
    assert found == [
        Answer("Identify the Question first: 4", 40, False),
        Answer("4\nQuestion", 11, False),
        Answer("Question: 4", 12, False),
    ]


def test_the_share_of_answers_that_were_cut_off_is_known(opened, scripted):
    """Trap E08: one of four has no room to end."""
    said = {"a": "12", "b": "a longer answer, 12", "c": "12;", "d": "12345678"}
    scripted(opened[1], said)
    found = [answer for (answer,) in draw(opened, list(said), stops=[";"], max_new_tokens=9)]
    assert [answer.cut for answer in found] == [False, True, False, False]
    assert [answer.tokens for answer in found] == [3, 9, 3, 9] and found[1].text == "a longer "


def test_the_first_of_several_stops_ends_an_answer_that_has_both(opened, scripted):
    scripted(opened[1], {"a": "one. two; three"})
    assert draw(opened, ["a"], stops=[";", ". "])[0][0].text == "one"


@pytest.mark.parametrize(
    ("wrong", "error", "told"),
    [
        ({"stops": "Question"}, TypeError, r"stops is the string 'Question'; expected a list of whole strings: \['Question'\]"),
        ({"stops": ["", "x"]}, ValueError, "an empty stop string"),
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens=0"), ({"samples": 0}, ValueError, "samples=0"), ({"rows": 0}, ValueError, "rows=0"),
    ],
)  # fmt: skip
def test_nothing_is_computed_for_what_cannot_be(opened, wrong, error, told):
    """Trap E08: a plain string would be a stop for each of its characters."""
    opened[0].forward = None
    with pytest.raises(error, match=told):
        draw(opened, ["a"], **wrong)


@pytest.mark.parametrize("sampling", [Sampling(), WARM])
@pytest.mark.parametrize("rows", [1, 2, 5, 64])
def test_each_answer_is_that_of_its_prompt_alone(opened, sampling, rows):
    """Traps E02 and E05: prompts of other lengths beside it, and rows that go on with the next prompt, change nothing."""
    runner, tokenizer, _ = opened
    eos = set(tokenizer("e ")["input_ids"])
    samples = 1 if sampling.greedy else 3
    found = draw(opened, PROMPTS, sampling=sampling, samples=samples, generator_of=generator_of, eos_ids=eos, max_new_tokens=12, rows=rows)
    for number, prompt in enumerate(ids(tokenizer)):
        for sample in range(samples):
            (alone,) = generate(
                runner,
                [prompt],
                sampling=sampling,
                max_new_tokens=12,
                eos_ids=eos,
                generators=[generator_of(number, sample)],
                vocabulary=len(tokenizer),
            )
            text = tokenizer.decode(alone.tokens, skip_special_tokens=True)
            assert found[number][sample] == Answer(text, len(alone.tokens), alone.tokens[-1] not in eos)
    lengths = {answer.tokens for of_prompt in found for answer in of_prompt}
    assert sampling.greedy or len(lengths) > 2


@pytest.mark.parametrize("name", ["gemma3", "qwen2 with a bias", "mistral with a window"])
def test_other_families_do_not_depend_on_how_many_are_side_by_side(make_decoder, opened, name):
    """Trap E05: windows and positions of rows of other lengths."""
    runner, tokenizer, _ = opened
    runner = TorchRunner(*weights_of(make_decoder(name)))
    one, many = (
        draw_answers(runner, tokenizer, ids(tokenizer), sampling=WARM, generator_of=generator_of, samples=2, max_new_tokens=10, rows=rows) for rows in (1, 4)
    )  # fmt: skip
    assert one == many


def test_keys_in_fewer_bits_change_what_is_said(opened):
    plain, coded = (
        draw(opened, PROMPTS, sampling=WARM, generator_of=generator_of, samples=4, max_new_tokens=30, kv_format=kv) for kv in (None, "int8")
    )
    assert plain != coded


@pytest.mark.parametrize("by_tokenizer", [True, False])
@pytest.mark.parametrize("by_template", [True, False])
def test_a_prompt_begins_with_one_beginning_of_sequence(opened, by_tokenizer, by_template):
    """Trap E01: the template, the tokenizer, or both say that it is to be there; it is there once. Where neither does, it is not."""
    tokenizer = opened[1]
    if by_tokenizer:
        tokenizer._tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)])
    begin = "{{ bos_token }}" if by_template else ""
    tokenizer.chat_template = begin + "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}[bot]"
    for chat, expected in ((False, by_tokenizer), (True, by_tokenizer or by_template)):
        found = prompt_ids(tokenizer, "How many?", chat=chat)
        assert found.count(tokenizer.bos_token_id) == expected and (found[0] == tokenizer.bos_token_id) == expected
    assert "[user] How many?\n[bot]" in tokenizer.decode(prompt_ids(tokenizer, "How many?\n\n", chat=True))


def test_a_chat_needs_a_template_and_a_text_its_positions(opened):
    _, tokenizer, directory = opened
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="has no chat template"):
        prompt_ids(tokenizer, "x", chat=True)
    require_positions(directory, 2048, "a prompt")
    with pytest.raises(ValueError, match=r"a prompt of asdiv is 2,049 tokens long with its answer, and the model has positions for 2,048"):
        require_positions(directory, 2049, "a prompt of asdiv")
