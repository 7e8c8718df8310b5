"""Plain decoding of one text and of several, against forwards of transformers without a cache; its stops, clock and refusals."""

import re
from itertools import count

import pytest
import torch

from assay.ops.decode.constraints import DeadEnd
from assay.ops.decode.fsm import TokenFsm, compile_regex
from assay.ops.decode.generate import generate
from assay.ops.decode.sampling import Sampling

PROMPT = [5, 17, 90, 3, 44]
PROMPTS = [PROMPT, [9, 60], [(7 * place) % 125 + 3 for place in range(50)]]


def seeds(*numbers):
    return [torch.Generator().manual_seed(number) for number in numbers]


def tokens(results):
    return [result.tokens for result in results]


@pytest.mark.parametrize("kind", ["tl8", "mistral"])
def test_every_step_of_every_text_has_the_logits_of_a_forward_without_cache(kind, tl8, make_mistral, run, record_forwards, full_logits):
    model = tl8 if kind == "tl8" else make_mistral()
    runner = run(model)
    forwards = record_forwards(runner)
    results = generate(runner, PROMPTS, max_new_tokens=20)
    expected = [full_logits(model, prompt + result.tokens) for prompt, result in zip(PROMPTS, results, strict=True)]
    places = [[] for _ in PROMPTS]
    for rows in forwards:
        for row, (positions, logits) in rows.items():
            places[row] += positions
            assert torch.allclose(logits, expected[row][positions], atol=1e-4)
    for prompt, result, seen, logits in zip(PROMPTS, results, places, expected, strict=True):
        assert seen == list(range(len(prompt) - 1, len(prompt) + 19))  # once each, and in the prefill the last alone
        assert result.tokens == logits[len(prompt) - 1 : -1].argmax(-1).tolist()


def test_a_tensor_and_lists_are_the_same_prompts(tl8, run):
    assert tokens(generate(run(tl8), torch.tensor([PROMPT]), max_new_tokens=4)) == tokens(generate(run(tl8), [PROMPT], max_new_tokens=4))


def test_each_text_ends_at_its_own_first_end_token_and_is_read_no_further(tl8, run, record_forwards):
    free = tokens(generate(run(tl8), PROMPTS, max_new_tokens=12))
    for end in (free[0][5], free[2][0], free[1][11]):
        runner = run(tl8)
        forwards = record_forwards(runner)
        ended = tokens(generate(runner, PROMPTS, max_new_tokens=12, eos_ids={end}))
        assert ended == [text[: text.index(end) + 1] if end in text else text for text in free]
        for row, text in enumerate(ended):
            assert sum(row in rows for rows in forwards) == len(text)


def test_a_seed_gives_the_same_text_again_and_another_seed_another(tl8, run):
    def draw(seed):
        return tokens(generate(run(tl8), [PROMPT], max_new_tokens=16, sampling=Sampling(3.0), generators=seeds(seed)))

    state = torch.get_rng_state()
    assert draw(1) == draw(1) != draw(2)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("sampling", [Sampling(3.0), Sampling(2.0, top_p=0.9, repetition_penalty=1.3, presence_penalty=0.5)])
def test_a_text_is_the_same_whatever_its_neighbours_are(tl8, run, sampling):
    settings = {"max_new_tokens": 24, "sampling": sampling}
    alone = [tokens(generate(run(tl8), [prompt], generators=seeds(row), **settings))[0] for row, prompt in enumerate(PROMPTS)]
    assert tokens(generate(run(tl8), PROMPTS, generators=seeds(0, 1, 2), **settings)) == alone
    assert tokens(generate(run(tl8), [PROMPTS[2], PROMPTS[1]], generators=seeds(2, 1), **settings)) == [alone[2], alone[1]]
    # A neighbour that ends early, and one with the same seed.
    ended = tokens(generate(run(tl8), PROMPTS, generators=seeds(0, 1, 2), eos_ids={alone[1][2]}, **settings))
    assert len(ended[1]) == 3
    assert ended[0] == alone[0][: len(ended[0])] and ended[2] == alone[2][: len(ended[2])]
    twins = tokens(generate(run(tl8), [PROMPT, PROMPT], generators=seeds(0, 0), **settings))
    assert twins == [alone[0], alone[0]]


@pytest.mark.usefixtures("unchecked_shapes")
def test_flat_logits_with_a_seed_give_many_distinct_tokens(tl8, run):
    with torch.no_grad():
        tl8.lm_head.weight.zero_()
    results = generate(run(tl8), [PROMPT, PROMPT], max_new_tokens=16, sampling=Sampling(1.0), generators=seeds(7, 8))
    assert all(len(set(result.tokens)) > 8 for result in results)
    assert results[0].tokens != results[1].tokens


@pytest.mark.usefixtures("unchecked_shapes")
def test_ids_beyond_the_tokenizer_never_come(tl8, run):
    with torch.no_grad():
        tl8.lm_head.weight[120:] = 50 * tl8.lm_head.weight[:8]  # the padding of the head shouts
    drawn = generate(run(tl8), [PROMPT], max_new_tokens=40, sampling=Sampling(50.0), generators=seeds(0))
    assert max(drawn[0].tokens) >= 120
    for temperature in (0.0, 50.0):
        cut = generate(run(tl8), PROMPTS, max_new_tokens=40, sampling=Sampling(temperature), generators=seeds(0, 1, 2), vocabulary=120)
        assert max(max(result.tokens) for result in cut) < 120


@pytest.mark.usefixtures("unchecked_shapes")
def test_penalties_look_at_the_text_of_their_own_row(tl8, run):
    free = tokens(generate(run(tl8), PROMPTS, max_new_tokens=20))
    assert any(len(set(text)) < 20 for text in free)
    found = tokens(generate(run(tl8), PROMPTS, max_new_tokens=20, sampling=Sampling(presence_penalty=1e6)))
    assert all(len(set(text)) == 20 for text in found)
    prompted = tokens(generate(run(tl8), PROMPTS, max_new_tokens=20, sampling=Sampling(presence_penalty=1e6, count_prompt=True)))
    assert all(not set(text) & set(prompt) for text, prompt in zip(prompted, PROMPTS, strict=True))


NAMES = {100 + index: name for index, name in enumerate("abcdefghijklmnopqrstuvwxyz01")}


def language(pattern):
    """Texts of the ids 100 to 127, which stand for a to z, 0 and 1; id 2 ends one."""
    spelt = [NAMES[token].encode() if token in NAMES else None for token in range(128)]
    return TokenFsm(compile_regex(pattern), spelt, head_size=128, eos_ids={2})


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(9.0), Sampling(9.0, top_p=0.5, repetition_penalty=2.0)])
def test_each_text_stays_in_its_own_language(tl8, run, sampling):
    settings = {"max_new_tokens": 12, "eos_ids": {2}, "sampling": sampling, "vocabulary": 128}
    constraints = [language("(ab|ba)*c"), None, language("[01]{3}")]
    first, free, third = tokens(generate(run(tl8), PROMPTS, constraints=constraints, generators=seeds(0, 1, 2), **settings))
    said = "".join(NAMES.get(token, ".") for token in first)
    assert re.fullmatch(r"(ab|ba)*c\.", said) or re.fullmatch("(ab|ba){6}", said)
    assert re.fullmatch(r"[01]{3}\.", "".join(NAMES.get(token, ".") for token in third))
    assert free == tokens(generate(run(tl8), PROMPTS[1:2], generators=seeds(1), **settings))[0]


def test_a_text_that_nothing_may_follow_is_a_dead_end(tl8, run):
    constraint = language("[01]{3}q")
    constraint.pieces = [None if token == 116 else piece for token, piece in enumerate(constraint.pieces)]  # there is no q
    with pytest.raises(DeadEnd, match="after 3 tokens"):
        generate(run(tl8), [PROMPT], max_new_tokens=8, constraints=[constraint])


def test_the_clock_is_read_around_the_prefill_and_at_the_end(tl8, run):
    ticks = count(0, 10)
    results = generate(run(tl8), PROMPTS, max_new_tokens=4, clock=lambda: float(next(ticks)))
    assert all((result.prefill_seconds, result.decode_seconds) == (10, 10) for result in results)
    assert next(ticks) == 30  # three readings, none per token


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"prompts": []}, "no prompt"),
        ({"prompts": [PROMPT, []]}, "no tokens"),
        ({"prompts": [[1, 128]]}, "128, outside"),
        ({"prompts": [[-1]]}, "-1, outside"),
        ({"sampling": Sampling(1.0)}, "generator"),
        ({"sampling": Sampling(1.0), "generators": seeds(1)}, "1 generators for 2 prompts"),
        ({"sampling": Sampling(1.0), "generators": seeds(1) * 2}, "share one of the generators"),
        ({"constraints": [None]}, "1 constraints for 2 prompts"),
        ({"vocabulary": 0}, "vocabulary=0"),
        ({"kv_format": "int3"}, "'int3'"),
    ],
)
def test_a_request_that_cannot_work_is_refused_before_the_first_forward(tl8, run, record_forwards, wrong, message):
    runner = run(tl8)
    forwards = record_forwards(runner)
    request = {"prompts": [PROMPT, PROMPT], "max_new_tokens": 4, **wrong}
    with pytest.raises(ValueError, match=message):
        generate(runner, request.pop("prompts"), **request)
    assert not forwards
