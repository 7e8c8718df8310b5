"""Speculative decoding against plain decoding and against forwards without a cache, one text and several."""

import re
from itertools import chain, count

import pytest
import torch

from assay.ops.decode.acceptance import Adaptive
from assay.ops.decode.constraints import DeadEnd
from assay.ops.decode.drafts import ModelDraft, NGramDraft, Proposal
from assay.ops.decode.fsm import TokenFsm, compile_regex
from assay.ops.decode.generate import generate
from assay.ops.decode.sampling import Sampling
from assay.ops.decode.speculate import speculative_generate

PROMPT = [5, 17, 90, 3, 44]
PROMPTS = [PROMPT, [9, 60], [(7 * place) % 125 + 3 for place in range(50)]]
FORCED = [0, 1, 2, 3, 4, 0, 0, 4, 4, 1, 3, 2, 0]  # every number of acceptances, and rollbacks after rollbacks


def seeds(*numbers):
    return [torch.Generator().manual_seed(number) for number in numbers]


def tokens(results):
    return [result.tokens for result in results]


def assert_same_texts(full_logits, model, prompts, plain, speculated, *, gap=1e-4):
    """Identical, or at the first difference two logits tie: a forward of several positions rounds otherwise than several of one."""
    for prompt, one, other in zip(prompts, plain, speculated, strict=True):
        assert len(one) == len(other)
        if one != other:
            at = next(index for index, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
            logits = full_logits(model, prompt + one[:at])[-1]
            assert abs(float(logits[one[at]] - logits[other[at]])) < gap


@pytest.mark.parametrize("kind", ["tl8", "mistral"])
def test_after_any_number_of_acceptances_the_logits_are_those_of_a_full_forward(
    kind, tl8, make_mistral, run, scripted_draft, record_forwards, full_logits
):
    # A stale row, a wrong position or a wrong window shows as an error near 8; so does a row that is rolled back with its neighbour's count.
    model = tl8 if kind == "tl8" else make_mistral()
    length = 1 + sum(FORCED) + len(FORCED) + 8
    plain = tokens(generate(run(model), PROMPTS, max_new_tokens=length))
    scripts = [[*FORCED, 4, 4, 4], [*FORCED[::-1], 4, 4, 4], [*FORCED[5:], *FORCED[:5], 4, 4, 4]]
    draft, runner = scripted_draft(plain, scripts), run(model)
    forwards = record_forwards(runner)
    results = speculative_generate(runner, draft, PROMPTS, max_new_tokens=length, gamma=4)
    assert tokens(results) == plain
    for row, (prompt, result, script) in enumerate(zip(PROMPTS, results, scripts, strict=True)):
        assert result.accepted[: len(FORCED)] == script[: len(FORCED)] == [kept[row] for kept in draft.settled[: len(FORCED)]]
        expected, place = full_logits(model, prompt + plain[row]), len(prompt)
        seen = [rows[row] for rows in forwards if row in rows][1:]  # behind the prefill
        assert len(seen) == result.rounds
        for accepted, (positions, logits) in zip(result.accepted, seen, strict=True):
            assert positions[0] == place
            assert torch.allclose(logits[: accepted + 1], expected[place : place + accepted + 1], atol=1e-4)
            place += accepted + 1


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize(("gamma", "length"), [(4, 64), (Adaptive(cost=0.2, most=7), 20)])
def test_greedy_speculation_gives_the_tokens_of_plain_decoding(make_llama, make_mistral, run, full_logits, kind, gamma, length):
    make = make_llama if kind == "llama" else make_mistral
    target = make()
    plain = tokens(generate(run(target), PROMPTS, max_new_tokens=length))
    for draft in (NGramDraft(3), ModelDraft(run(make(layers=1)))):
        results = speculative_generate(run(target), draft, PROMPTS, max_new_tokens=length, gamma=gamma)
        assert_same_texts(full_logits, target, PROMPTS, plain, tokens(results))


@pytest.mark.usefixtures("unchecked_shapes")
def test_a_draft_that_is_the_target_is_always_accepted_and_a_round_yields_gamma_plus_one(tl8, run):
    for result in speculative_generate(run(tl8), ModelDraft(run(tl8)), PROMPTS, max_new_tokens=1 + 5 * 6, gamma=4):
        assert result.proposed == result.accepted == [4] * 6
        assert (len(result.tokens) - 1) / result.rounds == 5
        assert result.overlaps == [[1.0] * 4] * 6


@pytest.mark.usefixtures("unchecked_shapes")
def test_a_sampling_draft_that_is_the_target_is_always_accepted(tl8, run):
    settings = {"max_new_tokens": 31, "gamma": 4, "sampling": Sampling(2.0, top_p=0.9), "generators": seeds(5, 6, 7)}
    for result in speculative_generate(run(tl8), ModelDraft(run(tl8)), PROMPTS, **settings):
        # p and q differ by rounding alone, so at most a draw in ten thousand is rejected.
        assert result.accepted == result.proposed == [4] * 6
        assert torch.tensor(result.overlaps).min() > 0.999


def test_an_n_gram_draft_saves_rounds_on_a_text_that_repeats_and_not_on_its_neighbour(tl8, run):
    with torch.no_grad():
        tl8.lm_head.weight.copy_(torch.roll(tl8.model.embed_tokens.weight, 1, dims=0))  # the text counts upwards, whatever came before
        for layer in tl8.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    prompts = [[*range(3, 12), 3], [60, 70]]
    plain = tokens(generate(run(tl8), prompts, max_new_tokens=8))
    results = speculative_generate(run(tl8), NGramDraft(3), prompts, max_new_tokens=8, gamma=4)
    assert tokens(results) == plain == [list(range(4, 12)), list(range(71, 79))]
    assert results[0].rounds < 4 < results[1].rounds == 7


class Fixed:
    """Proposes given tokens for each text in the first round and nothing later."""

    def __init__(self, *rows, probabilities=None):
        self.rows, self.probabilities = list(rows), probabilities

    def check(self, requests, *, vocabulary): ...

    def begin(self, requests, *, vocabulary): ...

    def propose(self, requests, counts, *, sampling):
        found, self.rows = self.rows, [[] for _ in self.rows]
        return [Proposal(row[:count], None if not row else self.probabilities) for row, count in zip(found, counts, strict=True)]

    def settle(self, accepted): ...


def test_an_end_token_inside_an_accepted_block_ends_that_text_there(tl8, run):
    # Of a block [x, EOS, y, z] that is all accepted, nothing behind EOS may be emitted; looking at the last token alone would go on.
    free = tokens(generate(run(tl8), PROMPTS[:2], max_new_tokens=12))
    end = free[0][2]
    assert end not in free[0][:2] and end not in free[1]
    plain = tokens(generate(run(tl8), PROMPTS[:2], max_new_tokens=12, eos_ids={end}))
    draft = Fixed(free[0][1:5], free[1][1:5])
    results = speculative_generate(run(tl8), draft, PROMPTS[:2], max_new_tokens=12, gamma=4, eos_ids={end})
    assert tokens(results) == plain == [free[0][:3], free[1]]
    assert (results[0].proposed, results[0].accepted) == ([2], [2])
    assert results[1].accepted[0] == 4


@pytest.mark.usefixtures("unchecked_shapes")
def test_an_end_token_stops_at_every_place_as_plain_decoding_does(tl8, run, scripted_draft):
    runner = run(tl8)
    free = tokens(generate(runner, PROMPTS[:2], max_new_tokens=20))
    for end in (*free[0][:5], free[1][8]):
        plain = tokens(generate(runner, PROMPTS[:2], max_new_tokens=20, eos_ids={end, 127}))
        draft = scripted_draft(free, [[4] * 20, [0, 2, 4, 1] * 5])
        assert tokens(speculative_generate(runner, draft, PROMPTS[:2], max_new_tokens=20, gamma=4, eos_ids={end, 127})) == plain


def test_a_rejected_end_token_does_not_end_the_text(tl8, run):
    free = tokens(generate(run(tl8), [PROMPT], max_new_tokens=8))
    wrong = next(token for token in range(128) if token not in free[0])
    draft = Fixed([free[0][1], wrong, 5])
    assert tokens(speculative_generate(run(tl8), draft, [PROMPT], max_new_tokens=8, gamma=4, eos_ids={wrong})) == free


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("limit", [1, 2, 3, 7, 12])
def test_the_limit_is_met_exactly_whatever_gamma_is(tl8, run, limit):
    for gamma in {1, min(3, limit), limit}:
        for result in speculative_generate(run(tl8), ModelDraft(run(tl8)), PROMPTS[:2], max_new_tokens=limit, gamma=gamma):
            assert len(result.tokens) == limit
            # Each round yields its acceptances and one token.
            assert sum(result.accepted) + result.rounds == limit - 1


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(("kind", "kv_format"), [("llama", "fp8_e4m3"), ("mistral", "int8")])
def test_a_quantized_cache_holds_while_verifying_too(tl8, make_mistral, run, scripted_draft, record_forwards, full_logits, kind, kv_format):
    # Tokens are quantized each by itself, so a block stores what single tokens would; rounding may move a value to the next code now and then.
    runner = run(tl8 if kind == "llama" else make_mistral())
    forwards = record_forwards(runner)
    (plain,) = tokens(generate(runner, [PROMPT], max_new_tokens=40, kv_format=kv_format))
    one_by_one = torch.cat([rows[0][1] for rows in forwards])
    unquantized = full_logits(tl8 if kind == "llama" else make_mistral(), PROMPT + plain)[len(PROMPT) - 1 : -1]
    assert (one_by_one - unquantized).abs().max() > 0.05  # the format is in force
    forwards.clear()
    draft = scripted_draft([plain], [FORCED * 2])
    (result,) = speculative_generate(runner, draft, [PROMPT], max_new_tokens=40, gamma=4, kv_format=kv_format)
    assert result.tokens == plain
    kept = [0, *result.accepted]
    in_blocks = torch.cat([rows[0][1][: accepted + 1] for accepted, rows in zip(kept, forwards, strict=True)])
    assert ((in_blocks - one_by_one).abs().amax(dim=-1) < 1e-3).float().mean() > 0.9


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("sampling", [Sampling(3.0), Sampling(2.0, top_p=0.9, repetition_penalty=1.3, presence_penalty=0.5)])
@pytest.mark.parametrize("gamma", [3, Adaptive(cost=0.1, most=4)])
def test_a_text_is_the_same_whatever_its_neighbours_are(tl8, make_llama, run, sampling, gamma):
    settings = {"max_new_tokens": 20, "sampling": sampling, "gamma": gamma}
    draft = ModelDraft(run(make_llama(layers=2)))
    alone = [speculative_generate(run(tl8), draft, [prompt], generators=seeds(row), **settings)[0] for row, prompt in enumerate(PROMPTS)]
    beside = speculative_generate(run(tl8), draft, PROMPTS, generators=seeds(0, 1, 2), **settings)
    for one, other in zip(alone, beside, strict=True):
        assert (one.tokens, one.proposed, one.accepted) == (other.tokens, other.proposed, other.accepted)
        assert torch.allclose(torch.tensor([*chain(*one.overlaps)]), torch.tensor([*chain(*other.overlaps)]), atol=1e-4)
    ended = speculative_generate(run(tl8), draft, PROMPTS[:2], generators=seeds(0, 1), eos_ids={alone[1].tokens[2]}, **settings)
    assert len(ended[1].tokens) == 3
    assert ended[0].tokens == alone[0].tokens[: len(ended[0].tokens)]


@pytest.mark.usefixtures("unchecked_shapes")
def test_penalties_count_what_was_emitted_and_what_is_proposed_before_a_place(tl8, run):
    settings = {"max_new_tokens": 30, "sampling": Sampling(presence_penalty=1e6)}
    plain = tokens(generate(run(tl8), PROMPTS, **settings))
    for draft in (ModelDraft(run(tl8)), NGramDraft(2)):
        assert tokens(speculative_generate(run(tl8), draft, PROMPTS, gamma=4, **settings)) == plain
    assert all(len(set(text)) == 30 for text in plain)
    assert all(
        result.accepted == result.proposed for result in speculative_generate(run(tl8), ModelDraft(run(tl8)), PROMPTS, gamma=4, **settings)
    )


NAMES = {100 + index: name for index, name in enumerate("abcdefghijklmnopqrstuvwxyz01")}


def language(pattern, without=()):
    """Texts of the ids 100 to 127, which stand for a to z, 0 and 1; id 2 ends one."""
    spelt = [NAMES[token].encode() if token in NAMES and NAMES[token] not in without else None for token in range(128)]
    return TokenFsm(compile_regex(pattern), spelt, head_size=128, eos_ids={2})


@pytest.mark.usefixtures("unchecked_shapes")
def test_constrained_texts_are_those_of_plain_decoding(tl8, make_llama, run):
    def settings():
        constraints = [language("(ab|ba)*c"), None, language("[01]{9}")]
        return {"max_new_tokens": 14, "eos_ids": {2}, "constraints": constraints}

    plain = tokens(generate(run(tl8), PROMPTS, **settings()))
    assert re.fullmatch(r"[01]{9}\.", "".join(NAMES.get(token, ".") for token in plain[2]))
    drafts = ModelDraft(run(tl8)), ModelDraft(run(make_llama(layers=2))), NGramDraft(2), Fixed([5, 6, 100], [7], [126, 126, 5])
    for draft in drafts:
        for gamma in (1, 4):
            results = speculative_generate(run(tl8), draft, PROMPTS, gamma=gamma, **settings())
            assert tokens(results) == plain
    same = speculative_generate(run(tl8), drafts[0], PROMPTS, gamma=4, **settings())
    assert all(result.accepted == result.proposed for result in same)


def test_a_dead_end_is_one_only_where_the_text_gets_to_it(tl8, run):
    # Behind one of two letters only q may come, and no token spells it. A draft that proposes this letter does no harm where the target wants the other.
    def write(pattern, **draft):
        settings = {"max_new_tokens": 6, "eos_ids": {2}, "constraints": [language(pattern, without="q")]}
        if not draft:
            return tokens(generate(run(tl8), [PROMPT], **settings))[0]
        return tokens(speculative_generate(run(tl8), Fixed([draft["proposed"], 5]), [PROMPT], gamma=3, **settings))[0]

    (wanted,) = set(write("c(a|b)")) & {100, 101}
    other = 201 - wanted
    for pattern, proposed in ((f"c({NAMES[other]}q|{NAMES[wanted]})", other), (f"c({NAMES[other]}q|{NAMES[wanted]})", wanted)):
        assert write(pattern, proposed=proposed) == write(pattern) == [102, wanted, 2]
    for proposed in (other, wanted):
        with pytest.raises(DeadEnd, match="after 2 tokens"):
            write(f"c({NAMES[wanted]}q|{NAMES[other]})", proposed=proposed)


@pytest.mark.usefixtures("unchecked_shapes")
def test_a_wider_and_a_narrower_draft_leave_the_text_as_it_is(make_llama, run, full_logits):
    target = make_llama()
    plain = tokens(generate(run(target), PROMPTS[:2], max_new_tokens=24))
    for vocab in (96, 160):
        draft = ModelDraft(run(make_llama(vocab=vocab, layers=1)))
        results = speculative_generate(run(target), draft, PROMPTS[:2], max_new_tokens=24, gamma=3)
        assert_same_texts(full_logits, target, PROMPTS[:2], plain, tokens(results))
        sampled = speculative_generate(
            run(target), draft, PROMPTS[:2], max_new_tokens=24, gamma=3, sampling=Sampling(5.0), generators=seeds(0, 1)
        )
        assert max(max(result.tokens) for result in sampled) < 128


@pytest.mark.usefixtures("unchecked_shapes")
def test_ids_beyond_the_tokenizer_never_come_with_a_draft_either(make_llama, run):
    target = make_llama()
    with torch.no_grad():
        target.lm_head.weight[120:] *= 20
    (result,) = speculative_generate(
        run(target), ModelDraft(run(make_llama(seed=1))), [PROMPT], max_new_tokens=40, gamma=3, sampling=Sampling(20.0), vocabulary=120,
        generators=seeds(0),
    )  # fmt: skip
    assert max(result.tokens) < 120


@pytest.mark.usefixtures("unchecked_shapes")
def test_one_draft_serves_one_batch_after_another(tl8, make_llama, run):
    small = run(make_llama(layers=2, seed=0))
    for draft in (ModelDraft(small), NGramDraft(2)):
        for prompts in (PROMPTS, [[9, 9, 60]], PROMPTS[::-1]):
            fresh = ModelDraft(small) if isinstance(draft, ModelDraft) else NGramDraft(2)
            expected = speculative_generate(run(tl8), fresh, prompts, max_new_tokens=12, gamma=3)
            again = speculative_generate(run(tl8), draft, prompts, max_new_tokens=12, gamma=3)
            assert [result[:5] for result in again] == [result[:5] for result in expected]


def test_a_seed_gives_the_same_text_again_and_leaves_the_shared_generator_alone(tl8, make_llama, run):
    draft = ModelDraft(run(make_llama(layers=2)))

    def draw(seed):
        return tokens(
            speculative_generate(run(tl8), draft, [PROMPT], max_new_tokens=16, gamma=3, sampling=Sampling(3.0), generators=seeds(seed))
        )

    state = torch.get_rng_state()
    assert draw(1) == draw(1) != draw(2)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_clock_is_read_around_the_prefill_and_at_the_end(tl8, run):
    ticks = count(0, 10)
    results = speculative_generate(run(tl8), NGramDraft(3), PROMPTS, max_new_tokens=8, gamma=3, clock=lambda: float(next(ticks)))
    assert all((result.prefill_seconds, result.decode_seconds) == (10, 10) for result in results)
    assert next(ticks) == 30


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"gamma": 0}, "gamma=0"),
        ({"gamma": 5}, "gamma=5 proposals a round with max_new_tokens=4"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"prompts": [[1, 128]]}, "128, outside"),
        ({"sampling": Sampling(1.0)}, "generator"),
        ({"prompts": [[1], [1, 110]]}, "prompt 1 has the id 110, outside the draft's vocabulary of 100"),
        ({"vocabulary": 120}, "the draft knows 100 ids and the tokenizer has 120"),
        ({"kv_format": "int3"}, "'int3'"),
    ],
)
def test_a_request_that_cannot_work_is_refused_before_the_first_forward(tl8, make_llama, run, record_forwards, wrong, message):
    runner, small = run(tl8), run(make_llama(vocab=100, layers=1))
    forwards = record_forwards(runner), record_forwards(small)
    request = {"prompts": [PROMPT], "max_new_tokens": 4, "gamma": 2, **wrong}
    with pytest.raises(ValueError, match=message):
        speculative_generate(runner, ModelDraft(small), request.pop("prompts"), **request)
    assert forwards == ([], [])


@pytest.mark.parametrize(("found", "message"), [([1, 2, 3], "at most 2"), ([1, 128], "128, outside")])
def test_a_draft_that_breaks_its_contract_is_named(tl8, run, found, message):
    class Bad(Fixed):
        def propose(self, requests, counts, *, sampling):
            return [Proposal(found, None)]

    with pytest.raises(ValueError, match=message):
        speculative_generate(run(tl8), Bad([]), [PROMPT], max_new_tokens=8, gamma=2)
