"""The distance between masking and conditioning: by hand, against sums over all sequences, and draws against enumeration."""

import hashlib
import math
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.ops.decode.fsm import TokenFsm, compile_regex
from assay.ops.evaluate.constrained import (
    CUT,
    DEAD_END,
    END,
    Estimate,
    Outcomes,
    distances,
    draw_masked,
    enumerate_masked,
    expectations,
    greedy,
    language,
)

EOS = 0
PIECES = [None, b"a", b"b", b"ab"]


def constraint(pattern, *, head_size=4):
    return TokenFsm(compile_regex(pattern), PIECES, head_size=head_size, eos_ids=[EOS])


def model(seed=0, *, spread=1.5, width=4, asked=None):
    """Logits that depend on the whole text and on nothing else."""

    def next_logits(texts):
        if asked is not None:
            asked.extend(texts)
        seeds = [int(hashlib.sha256(f"{seed} {text}".encode()).hexdigest()[:12], 16) for text in texts]
        return torch.stack([spread * torch.randn(width, generator=torch.Generator().manual_seed(each)) for each in seeds])

    return next_logits


def table(rows):
    """A model that gives the next token the chances written for each text, and equal ones after any other."""
    return lambda texts: torch.stack([torch.tensor(rows.get(text, [0.25] * 4)).log() for text in texts])


def exactly(pattern, next_logits, *, temperature=1.0, vocabulary=4, max_tokens=8):
    whole = language(constraint(pattern), max_tokens=max_tokens, limit=500)
    assert whole is not None
    return enumerate_masked(whole, next_logits, temperature=temperature, vocabulary=vocabulary)


def drawn(pattern, next_logits, samples, *, seed=0, max_tokens=8, temperature=1.0):
    return draw_masked(
        constraint(pattern), next_logits, samples=samples, max_tokens=max_tokens, temperature=temperature, vocabulary=4, seed=seed
    )


HAND = {(): [0.1, 0.6, 0.3, 0.0], (1,): [0.4, 0.5, 0.1, 0.0], (1, 2): [0.5, 0.5, 0.0, 0.0], (2,): [0.8, 0.1, 0.1, 0.0]}


def test_two_texts_worked_by_hand():
    """ab is written a·b: p = .6·.1·.5 = .03, w = .9·.1·.5 = .045, p_mask = 2/3; b: p = .24, w = .72, p_mask = 1/3; Z = .27, p_cond = 1/9 and 8/9."""
    by_letter = TokenFsm(compile_regex("ab|b"), [None, b"a", b"b"], head_size=4, eos_ids=[EOS])
    made = enumerate_masked(language(by_letter, max_tokens=3, limit=4), table(HAND), temperature=1.0, vocabulary=4)
    kept = {
        text: (float(chance), float(weight)) for text, chance, weight in zip(made.texts, made.chance, made.log_weight.exp(), strict=True)
    }
    assert set(kept) == {(1, 2, EOS), (2, EOS)}
    assert kept[(1, 2, EOS)] == pytest.approx((2 / 3, 0.045)) and kept[(2, EOS)] == pytest.approx((1 / 3, 0.72))
    found = distances(made)
    assert found.tv.value == pytest.approx(5 / 9)
    assert found.kl.value == pytest.approx(2 / 3 * math.log(6) + 1 / 3 * math.log(3 / 8))
    assert found.reverse_kl.value == pytest.approx(1 / 9 * math.log(1 / 6) + 8 / 9 * math.log(8 / 3))
    assert found.log_legal_mass.value == pytest.approx(math.log(0.27))
    assert found.effective_share.value == pytest.approx(0.27**2 / (2 / 3 * 0.045**2 + 1 / 3 * 0.72**2))
    assert all(each.standard_error is None for each in found)
    right = torch.tensor([float(text == (2, EOS)) for text in made.texts], dtype=torch.float64)
    under_mask, under_condition = expectations(made, right)
    assert (under_mask.value, under_condition.value) == pytest.approx((1 / 3, 8 / 9))


LANGUAGES = ["ab|b", "a?b?", "(a|b){2}", "(ab){1,2}|a", "[ab]{0,3}", ""]


@settings(deadline=None, max_examples=40)
@given(pattern=st.sampled_from(LANGUAGES), seed=st.integers(0, 1000), temperature=st.sampled_from([0.3, 1.0, 2.5]))
def test_the_closed_forms_are_those_of_the_two_distributions_written_out(pattern, seed, temperature):
    """All sequences of up to six tokens are tried, legal or not, with chances multiplied one by one."""
    next_logits, dfa = model(seed), compile_regex(pattern)
    p, p_mask = {}, {}
    begins = list(dfa.strings())
    for length in range(7):
        for text in product((1, 2, 3), repeat=length):
            if not dfa.accepts(b"".join(PIECES[token] for token in text).decode()):
                continue
            whole = (*text, EOS)
            p[whole] = p_mask[whole] = 1.0
            for at, token in enumerate(whole):
                row = (next_logits([whole[:at]])[0].double() / temperature).softmax(dim=-1)
                written = b"".join(PIECES[each] for each in whole[:at]).decode()
                legal = [each for each in (1, 2, 3) if any(text.startswith(written + PIECES[each].decode()) for text in begins)]
                legal += [EOS] if dfa.accepts(written) else []
                p[whole] *= float(row[token])
                p_mask[whole] *= float(row[token] / row[legal].sum())
    made = exactly(pattern, next_logits, temperature=temperature)
    assert set(made.texts) == set(p) and len(made.texts) == len(p) and set(made.ended) == {END}
    assert sum(p_mask.values()) == pytest.approx(1) == pytest.approx(float(made.chance.sum()))
    for text, chance in zip(made.texts, made.chance.tolist(), strict=True):
        assert chance == pytest.approx(p_mask[text], rel=1e-6)
    z = sum(p.values())
    found, condition = distances(made), {text: chance / z for text, chance in p.items()}
    assert found.log_legal_mass.value == pytest.approx(math.log(z), abs=1e-6)
    assert found.tv.value == pytest.approx(sum(abs(p_mask[text] - condition[text]) for text in p) / 2, abs=1e-6)
    assert found.kl.value == pytest.approx(sum(p_mask[text] * math.log(p_mask[text] / condition[text]) for text in p), abs=1e-6)
    assert found.reverse_kl.value == pytest.approx(sum(condition[text] * math.log(condition[text] / p_mask[text]) for text in p), abs=1e-6)
    chi2 = sum((condition[text] - p_mask[text]) ** 2 / p_mask[text] for text in p)
    assert found.effective_share.value == pytest.approx(1 / (1 + chi2), rel=1e-5)
    # Pinsker, and log Z never above 0
    assert found.tv.value <= math.sqrt(found.kl.value / 2 + 1e-9) and found.log_legal_mass.value <= 0


def test_where_every_first_token_leads_equally_far_masking_is_conditioning():
    found = distances(exactly("[ab]", lambda texts: torch.zeros(len(texts), 4)))
    assert found.tv.value == pytest.approx(0, abs=1e-12) and found.kl.value == pytest.approx(0, abs=1e-12)
    assert found.effective_share.value == pytest.approx(1) and found.log_legal_mass.value == pytest.approx(math.log(2 / 4 / 4))


def test_draws_are_of_p_mask_and_estimate_what_enumeration_gives():
    next_logits = model(2, spread=2)
    exact, sampled = exactly("a?b[ab]{1,2}", next_logits), drawn("a?b[ab]{1,2}", next_logits, 4000)
    chance = dict(zip(exact.texts, exact.chance.tolist(), strict=True))
    weights = dict(zip(exact.texts, exact.log_weight.tolist(), strict=True))
    assert sampled.share(END) == 1 and all(
        sampled.log_weight[index] == pytest.approx(weights[text]) for index, text in enumerate(sampled.texts)
    )
    often = [text for text in chance if chance[text] * 4000 > 8]
    chi2 = sum((sampled.texts.count(text) - 4000 * chance[text]) ** 2 / (4000 * chance[text]) for text in often)
    assert chi2 < len(often) + 5 * math.sqrt(2 * len(often))
    for name, estimate in distances(sampled)._asdict().items():
        truth = getattr(distances(exact), name).value
        assert 0 < estimate.standard_error < 0.2, name
        assert abs(estimate.value - truth) < 4 * estimate.standard_error, name
    assert distances(exact).tv.value > 0.2  # there is something to find
    ends_in_b = [torch.tensor([float(text[-2:-1] == (2,)) for text in made.texts], dtype=torch.float64) for made in (exact, sampled)]
    for truth, estimate in zip(expectations(exact, ends_in_b[0]), expectations(sampled, ends_in_b[1]), strict=True):
        assert abs(estimate.value - truth.value) < 4 * estimate.standard_error < 0.2


def test_standard_errors_are_the_spread_of_repeated_estimates():
    """Of an idealised importance sampler, so that thousands of repetitions cost nothing."""
    generator = torch.Generator().manual_seed(0)
    runs = []
    for _ in range(400):
        log_weight = 0.5 * torch.randn(400, generator=generator, dtype=torch.float64)
        runs.append(distances(Outcomes([()] * 400, [END] * 400, log_weight, None)))
    for at in range(5):
        values = torch.tensor([run[at].value for run in runs], dtype=torch.float64)
        told = sum(run[at].standard_error for run in runs) / len(runs)
        assert told == pytest.approx(float(values.std()), rel=0.2)
    # w is log-normal: log Z = σ²/2, both divergences are σ²/2, the share is exp(-σ²)
    means = [sum(run[at].value for run in runs) / len(runs) for at in range(5)]
    assert means[1:] == pytest.approx([0.125, 0.125, 0.125, math.exp(-0.25)], rel=0.05)


def test_a_draw_depends_on_its_own_seed_alone_and_equal_texts_share_a_forward():
    asked = []
    ten = drawn("[ab]{0,3}", model(1, asked=asked), 10)
    assert len(asked) == len(set(asked))
    assert drawn("[ab]{0,3}", model(1), 4).texts == ten.texts[:4]
    assert drawn("[ab]{0,3}", model(1), 4, seed=3).texts == ten.texts[3:7]


def test_ids_beyond_the_tokenizer_have_no_chance_in_the_model_either():
    def padded(texts):
        return torch.cat([model(2)(texts), torch.full((len(texts), 3), 50.0)], dim=1)

    whole = language(constraint("a?b?", head_size=7), max_tokens=8, limit=100)
    wide = distances(enumerate_masked(whole, padded, temperature=1.0, vocabulary=4))
    assert wide == distances(exactly("a?b?", model(2)))


def test_lost_chance_of_dead_ends_counts_and_makes_a_divergence_infinite():
    """ab|b without a token for b alone behind a: the mask lets a come, and nothing can follow it. p(a) = .6, p(ab) = .1, p($ | ab) = .5."""
    pieces = [None, b"a", b"xx", b"ab"]
    stuck = TokenFsm(compile_regex("ab|abb"), pieces, head_size=4, eos_ids=[EOS])
    rows = {(): [0.2, 0.6, 0.1, 0.1], (3,): [0.5, 0.2, 0.2, 0.1]}
    whole = language(stuck, max_tokens=4, limit=10)
    assert whole.dead_ends == [(1,)] and whole.texts == [(3, EOS)]
    made = enumerate_masked(whole, table(rows), temperature=1.0, vocabulary=4)
    assert made.share(DEAD_END) == pytest.approx(6 / 7)
    found = distances(made)
    assert found.tv.value == pytest.approx(6 / 7) and found.kl == Estimate(None)
    assert found.log_legal_mass.value == pytest.approx(math.log(0.05)) and found.reverse_kl.value == pytest.approx(math.log(7))
    sampled = draw_masked(stuck, table(rows), samples=200, max_tokens=4, temperature=1.0, vocabulary=4, seed=0)
    assert sampled.share(DEAD_END) == pytest.approx(6 / 7, abs=0.08) and set(sampled.ended) == {DEAD_END, END}
    assert distances(sampled).tv.value == pytest.approx(sampled.share(DEAD_END)) and distances(sampled).kl.value is None
    assert distances(sampled).log_legal_mass.value == pytest.approx(math.log(0.05), abs=0.6)


def test_a_language_is_listed_whole_or_not_at_all_and_no_model_is_asked():
    whole = language(constraint("(ab)?"), max_tokens=3, limit=10)
    assert sorted(whole.texts) == [(EOS,), (1, 2, EOS), (3, EOS)] and not whole.dead_ends
    assert sorted(whole.prefixes) == [((), (0, 1, 3)), ((1,), (2,)), ((1, 2), (0,)), ((3,), (0,))]
    assert language(constraint("(ab)?"), max_tokens=3, limit=4) is not None
    assert language(constraint("(ab)?"), max_tokens=3, limit=3) is None
    assert language(constraint("(ab)?"), max_tokens=2, limit=10) is None
    assert language(constraint(""), max_tokens=1, limit=1).texts == [(EOS,)] and language(constraint(""), max_tokens=1, limit=0) is None
    assert language(constraint("a*"), max_tokens=30, limit=10_000) is None


def test_texts_that_do_not_end_in_time_are_cut_and_are_no_legal_texts():
    never = table({(1,) * count: [0.0, 1.0, 0.0, 0.0] for count in range(5)})
    made = draw_masked(constraint("a*"), never, samples=3, max_tokens=5, temperature=1.0, vocabulary=4, seed=0)
    assert made.ended == [CUT] * 3 and made.share(CUT) == 1 and (made.log_weight == -math.inf).all()
    with pytest.raises(ValueError, match="none of 3 outcomes is a legal text"):
        distances(made)
    exactly_in_time = draw_masked(
        constraint("aa"),
        table({(): HAND[()], (1,): [0.1, 0.9, 0, 0], (1, 1): [1.0, 0, 0, 0]}),
        samples=2,
        max_tokens=3,
        temperature=1.0,
        vocabulary=4,
        seed=0,
    )
    assert exactly_in_time.ended == [END, END]


def test_greedy_takes_the_likeliest_legal_token_and_free_greedy_the_likeliest():
    rows = table({**HAND, (1, 1): [0.9, 0.1, 0.0, 0.0]})
    settings = {"eos_ids": frozenset([EOS]), "max_tokens": 5, "vocabulary": 4}
    assert greedy(constraint("ab|b"), rows, **settings) == (1, 2, EOS)
    assert greedy(None, rows, **settings) == (1, 1, EOS)
    assert greedy(None, table({(1,) * count: [0, 1.0, 0, 0] for count in range(5)}), **settings) == (1,) * 5


def test_a_model_that_gives_all_that_is_legal_no_chance_is_refused():
    with pytest.raises(ValueError, match="no chance"):
        exactly("b", table({(): [0.5, 0.5, 0.0, 0.0]}))


def test_one_draw_has_no_standard_error():
    found = distances(drawn("a|b", model(0), 1))
    assert found.tv == Estimate(0.0) and found.kl.standard_error is None
