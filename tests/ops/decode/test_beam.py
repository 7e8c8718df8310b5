"""Beam search: worked by hand, against an enumeration of every text, a search written plainly, and transformers' own."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.ops.decode.beam import Beam, beam_search
from assay.ops.decode.session import Session


class TableReader:
    """Rows of text whose next-token logits are looked up by what follows the prompt; counts the tokens that it was given to read."""

    def __init__(self, rows, logits_after, prompt=1):
        self.texts, self.logits_after, self.prompt, self.read_tokens = [[] for _ in range(rows)], logits_after, prompt, 0

    def read(self, ids, keep=1):
        assert len(ids) == len(self.texts)
        for text, new in zip(self.texts, ids, strict=True):
            text.extend(new)
            self.read_tokens += len(new)
        return [self.logits_after(tuple(text[self.prompt :])).expand(keep, -1) for text in self.texts]

    def reorder(self, sources):
        assert len(sources) == len(self.texts)
        self.texts = [list(self.texts[source]) for source in sources]


def random_table(seed, vocab, *, scale=1.5):
    def logits_after(text):
        return scale * torch.randn(vocab, generator=torch.Generator().manual_seed(hash((seed, *text)) % 2**31))

    return logits_after


def search(table, **asked):
    return beam_search(TableReader(asked["beams"], table), [1], **asked)


EOS = frozenset({0})


def every_text(table, vocab, longest, length_penalty):
    """All texts that end at EOS or at the longest length, with their scores, the best first."""
    found = []
    for length in range(1, longest + 1):
        for tokens in itertools.product(range(vocab), repeat=length):
            if 0 in tokens[:-1] or (length < longest and tokens[-1] != 0):
                continue
            log_prob = sum(float(table(tokens[:at]).log_softmax(dim=-1)[token]) for at, token in enumerate(tokens))
            found.append((log_prob / length**length_penalty, list(tokens)))
    return sorted(found, key=lambda each: -each[0])


@settings(max_examples=20)
@given(seed=st.integers(0, 1000), length_penalty=st.sampled_from([-1.0, 0.0, 0.7, 1.0, 2.0]))
def test_with_room_for_every_text_it_finds_the_best_of_all(seed, length_penalty):
    table = random_table(seed, 3)
    expected = every_text(table, 3, 4, length_penalty)
    found = search(table, beams=81, max_new_tokens=4, eos_ids=EOS, length_penalty=length_penalty, stop="bound")
    assert [beam.tokens for beam in found] == [tokens for _, tokens in expected]
    assert [beam.score for beam in found] == pytest.approx([score for score, _ in expected], abs=1e-5)


def test_it_finds_what_greedy_decoding_misses_worked_by_hand():
    # .6 · .4 = .24 by the likelier first token, .4 · .9 = .36 by the other.
    after = {(): [0.0, 0.6, 0.4], (1,): [0.3, 0.4, 0.3], (2,): [0.05, 0.05, 0.9]}
    found = search(lambda text: torch.tensor(after[text]).log(), beams=2, max_new_tokens=2, length_penalty=0.0)
    assert [beam.tokens for beam in found] == [[2, 2], [1, 1]]
    assert [beam.log_prob for beam in found] == pytest.approx([math.log(0.36), math.log(0.24)])
    assert not any(beam.ended for beam in found)


def test_the_length_penalty_divides_by_the_length_to_its_power():
    # Ending at once has .3; going on twice .7 · .6 = .42 in all, for which ending is the third token, .42 · 1.
    after = {(): [0.3, 0.7], (1,): [0.4, 0.6], (1, 1): [1.0, 0.0]}
    table = lambda text: torch.tensor(after[text]).log()  # noqa: E731
    for penalty in (0.0, 1.0, 2.0):
        found = {tuple(beam.tokens): beam.score for beam in search(table, beams=3, max_new_tokens=3, eos_ids=EOS, length_penalty=penalty)}
        expected = {(0,): math.log(0.3), (1, 0): math.log(0.28) / 2**penalty, (1, 1, 0): math.log(0.42) / 3**penalty}
        assert found == pytest.approx(expected)


@given(seed=st.integers(0, 1000), longest=st.integers(1, 8))
def test_one_beam_that_stops_at_the_first_end_is_greedy_decoding(seed, longest):
    table, text = random_table(seed, 5), []
    while len(text) < longest and 0 not in text:
        text.append(int(table(tuple(text)).argmax()))
    (found,) = search(table, beams=1, max_new_tokens=longest, eos_ids=EOS, stop="full")
    assert found.tokens == text and found.ended == (text[-1] == 0)


def searched_plainly(table, vocab, beams, longest, length_penalty):
    """The same search, never stopped early."""
    ended, running = [], [([], 0.0)]
    for length in range(1, longest + 1):
        every = [
            ([*tokens, token], log_prob + log_p)
            for tokens, log_prob in running
            for token, log_p in enumerate(table(tuple(tokens)).log_softmax(dim=-1).tolist())
        ]
        every = sorted(every, key=lambda each: -each[1])[: 2 * beams]
        over = [tokens[-1] == 0 or length == longest for tokens, _ in every]
        ended += [(log_prob / length**length_penalty, tokens) for (tokens, log_prob), end in zip(every, over, strict=True) if end][
            : sum(over[:beams])
        ]
        running = [each for each, end in zip(every, over, strict=True) if not end][:beams]
    return sorted(ended, key=lambda each: -each[0])[:beams]


@settings(max_examples=30)
@given(seed=st.integers(0, 1000), beams=st.integers(1, 4), length_penalty=st.sampled_from([-0.5, 0.0, 1.0, 3.0]))
def test_the_bound_stops_no_search_that_could_still_find_something(seed, beams, length_penalty):
    table = random_table(seed, 4)
    expected = searched_plainly(table, 4, beams, 7, length_penalty)
    found = search(table, beams=beams, max_new_tokens=7, eos_ids=EOS, length_penalty=length_penalty, stop="bound")
    assert [beam.tokens for beam in found] == [tokens for _, tokens in expected]


def by_rule(table, beams):
    """How many tokens were read and the best text, for each rule."""
    found = {}
    for stop in ("full", "heuristic", "bound"):
        reader = TableReader(beams, table)
        found[stop] = beam_search(reader, [1], beams=beams, max_new_tokens=30, eos_ids=EOS, stop=stop)[0]
        found[stop, "read"] = reader.read_tokens
    return found


def test_the_heuristic_misses_a_text_that_gets_better_with_its_length_and_the_bound_does_not():
    # Ending at once has .6; of a text that goes on, all tokens after the first are certain, so its mean log-probability rises from log .4 to 0.
    found = by_rule(lambda text: torch.tensor([0.6, 0.4] if not text else [0.0, 1.0]).log(), beams=1)
    assert found["heuristic"].tokens == [0] and found["heuristic", "read"] == 1
    assert found["bound"].tokens == [1] * 30
    assert found["bound"].score == pytest.approx(math.log(0.4) / 30) and found["bound"].score > found["heuristic"].score


def test_the_first_rule_ends_where_a_running_text_is_better_already():
    # After two steps [0] and [1, 0] have ended with means of log .3 and log √.12, and [1, 1] runs with log √.16.
    found = by_rule(lambda text: torch.tensor([0.3, 0.4, 0.3]).log(), beams=2)
    assert found["full"].tokens == [1, 0] and found["full", "read"] == 3
    assert found["heuristic"].score > found["full"].score and found["heuristic", "read"] > 3


def test_a_text_never_goes_on_after_its_end_and_every_score_is_that_of_its_tokens():
    table = random_table(5, 6)
    found = search(table, beams=4, max_new_tokens=10, eos_ids={0, 3}, length_penalty=0.5)
    assert len(found) == 4 and [beam.score for beam in found] == sorted((beam.score for beam in found), reverse=True)
    for beam in found:
        assert not {0, 3} & set(beam.tokens[:-1])
        log_prob = sum(float(table(tuple(beam.tokens[:at])).log_softmax(dim=-1)[token]) for at, token in enumerate(beam.tokens))
        assert beam == Beam(
            beam.tokens, pytest.approx(log_prob, abs=1e-5), pytest.approx(log_prob / len(beam.tokens) ** 0.5, abs=1e-5), beam.ended
        )


def test_the_prompt_is_read_once_and_each_step_reads_one_token_a_beam():
    reader = TableReader(3, random_table(1, 8), prompt=5)
    beam_search(reader, [1, 2, 3, 4, 5], beams=3, max_new_tokens=4)
    assert reader.read_tokens == 5 + 3 * 3


def test_of_equal_texts_the_lower_ids_come_first():
    found = search(lambda text: torch.zeros(6), beams=3, max_new_tokens=2)
    assert [beam.tokens for beam in found] == [[0, 0], [0, 1], [0, 2]]


def test_what_cannot_come_is_never_a_beam():
    found = search(lambda text: torch.tensor([-math.inf, 0.0, -math.inf]), beams=4, max_new_tokens=3)
    assert [beam.tokens for beam in found] == [[1, 1, 1]]


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"beams": 0}, "beams=0"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"stop": "early"}, "full, heuristic, bound"),
        ({"length_penalty": math.nan}, "length_penalty"),
    ],
)
def test_parameters_out_of_range_are_refused(wrong, told):
    with pytest.raises(ValueError, match=told):
        beam_search(TableReader(2, random_table(0, 3)), [1], **{"beams": 2, "max_new_tokens": 2, **wrong})
    with pytest.raises(ValueError, match="prompt has no tokens"):
        beam_search(TableReader(2, random_table(0, 3)), [], beams=2, max_new_tokens=2)


def test_logits_without_a_distribution_are_refused():
    with pytest.raises(ValueError, match="row of logits"):
        search(lambda text: torch.tensor([math.nan, 0.0]), beams=1, max_new_tokens=1)


# --- transformers ----------------------------------------------------------------------------------------------------------------------------


class ModelReader:
    """Reads each row anew in one forward, without a cache, so that nothing can go stale."""

    def __init__(self, model, rows):
        self.model, self.texts = model, [[] for _ in range(rows)]

    def read(self, ids, keep=1):
        for text, new in zip(self.texts, ids, strict=True):
            text.extend(new)
        with torch.inference_mode():
            return [self.model(input_ids=torch.tensor([text])).logits[0, -keep:] if text else torch.empty(keep, 128) for text in self.texts]

    def reorder(self, sources):
        self.texts = [list(self.texts[source]) for source in sources]


PROMPT = [5, 17, 90]
THEIRS = {"full": True, "heuristic": False, "bound": "never"}


@pytest.mark.parametrize("stop", THEIRS)
@pytest.mark.parametrize(
    ("length_penalty", "eos_ids"), [(1.0, [2]), (0.0, [2, 10, 40, 77]), (2.0, [3, 10, 40, 77, 101, 120]), (-1.0, [3, 40, 120])]
)
def test_it_finds_what_transformers_finds(tl8, stop, length_penalty, eos_ids):
    from transformers import GenerationConfig

    with torch.no_grad():
        tl8.lm_head.weight.div_(6)  # less certain, so that texts end at different places
    config = GenerationConfig(
        num_beams=4, num_return_sequences=4, max_new_tokens=12, length_penalty=length_penalty, early_stopping=THEIRS[stop], eos_token_id=eos_ids,
        pad_token_id=126, bos_token_id=1, do_sample=False, return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    theirs = tl8.generate(torch.tensor([PROMPT]), generation_config=config)
    found = beam_search(
        ModelReader(tl8, 4), PROMPT, beams=4, max_new_tokens=12, eos_ids=frozenset(eos_ids), length_penalty=length_penalty, stop=stop
    )
    assert [beam.score for beam in found] == pytest.approx(theirs.sequences_scores.tolist(), abs=1e-4)
    for beam, row in zip(found, theirs.sequences[:, len(PROMPT) :].tolist(), strict=True):
        assert beam.tokens == row[: len(beam.tokens)] and set(row[len(beam.tokens) :]) <= {126}
    if len(eos_ids) > 3:
        assert any(beam.ended for beam in found)


@pytest.mark.parametrize("eos_ids", [[2], [3, 10, 40, 77, 101, 120]])
def test_a_session_with_a_cache_finds_what_reading_anew_finds(tl8, run, eos_ids):
    with torch.no_grad():
        tl8.lm_head.weight.div_(6)
    asked = {"beams": 4, "max_new_tokens": 12, "eos_ids": frozenset(eos_ids), "stop": "bound"}
    found = beam_search(Session(run(tl8), rows=4, capacity=32), PROMPT, **asked)
    expected = beam_search(ModelReader(tl8, 4), PROMPT, **asked)
    assert [beam.tokens for beam in found] == [beam.tokens for beam in expected]
    assert [beam.score for beam in found] == pytest.approx([beam.score for beam in expected], abs=1e-4)
