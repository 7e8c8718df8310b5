"""Samples of several prompts: each is what it would be alone, whatever shares its batch and however much of its prompt is shared."""

import pytest
import torch

from assay.ops.decode.generate import generate
from assay.ops.decode.samples import draw_samples
from assay.ops.decode.sampling import Sampling

PROMPTS = [[5, 9, 33, 7, 20, 21], [5, 9, 33, 7, 41], [5, 9, 33, 50, 51, 52, 53]]
WARM, GREEDY, PENALISED = Sampling(0.9), Sampling(), Sampling(0.8, top_p=0.9, frequency_penalty=0.5)
STOPS = frozenset(range(100, 128))


def generator_of(prompt, sample):
    return torch.Generator().manual_seed(100 * prompt + sample)


@pytest.fixture
def runner(make_llama, run):
    model = make_llama(layers=2)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.15)
    return run(model)


def alone(runner, prompt, number, sampling, sample, **more):
    (found,) = generate(runner, [prompt], sampling=sampling, generators=[generator_of(number, sample)], max_new_tokens=9, **more)
    return found.tokens


def test_every_sample_is_that_of_its_prompt_alone_with_its_generator(runner):
    asked = [(GREEDY, 1), (WARM, 4), (PENALISED, 3)]
    found = draw_samples(runner, PROMPTS, asked, max_new_tokens=9, generator_of=generator_of, stop_ids=STOPS, vocabulary=120)
    for number, prompt in enumerate(PROMPTS):
        for (sampling, count), samples in zip(asked, found[number], strict=True):
            assert samples == [alone(runner, prompt, number, sampling, sample, eos_ids=STOPS, vocabulary=120) for sample in range(count)]
    every = [sample for of_prompt in found for samples in of_prompt for sample in samples]
    assert {len(sample) for sample in every} > {9} and all(token < 120 for sample in every for token in sample)
    assert all(sample[-1] in STOPS for sample in every if len(sample) < 9) and not any(set(sample[:-1]) & STOPS for sample in every)
    assert len({tuple(sample) for sample in found[0][1]}) == 4


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 7, 8, 100])
def test_samples_do_not_depend_on_how_many_are_drawn_side_by_side(runner, rows):
    asked = [(GREEDY, 1), (WARM, 6)]
    same = {"max_new_tokens": 9, "generator_of": generator_of, "stop_ids": STOPS}
    assert draw_samples(runner, PROMPTS, asked, rows=rows, **same) == draw_samples(runner, PROMPTS, asked, rows=4, **same)


@pytest.mark.parametrize("prompts", [[[3, 4, 5]], [[3, 4, 5], [3, 4, 5]], [[3], [3, 4]], [[3, 4], [5, 6]]])
def test_prompts_may_share_nothing_everything_or_all_but_the_last_token(runner, prompts):
    found = draw_samples(runner, prompts, [(WARM, 2)], max_new_tokens=9, generator_of=generator_of)
    assert found == [[[alone(runner, prompt, number, WARM, sample) for sample in range(2)]] for number, prompt in enumerate(prompts)]


def test_what_prompts_share_is_read_once_and_the_rest_once_a_prompt(runner):
    read = []
    forward = runner.forward
    runner.forward = lambda cache, step: (read.append(len(step.ids)), forward(cache, step))[1]
    draw_samples(runner, PROMPTS, [(WARM, 5)], max_new_tokens=2, generator_of=generator_of)
    assert read == [3, 3, 5, 2, 5, 4, 5]  # the beginning; the rest of each prompt, and the second token of five samples


def test_more_samples_begin_with_the_same_ones(runner):
    few, many = (draw_samples(runner, PROMPTS, [(WARM, count)], max_new_tokens=5, generator_of=generator_of) for count in (2, 5))
    assert [samples[0][:2] for samples in many] == [samples[0] for samples in few]


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"prompts": [[]]}, "the prompt has no tokens"), ({"prompts": [[3], [999]]}, "has the id 999"), ({"asked": [(WARM, 0)]}, r"samples=\[0\]"),
        ({"asked": []}, r"samples=\[\]"), ({"max_new_tokens": 0}, "max_new_tokens=0"), ({"rows": 0}, "rows=0"), ({"vocabulary": 0}, "leaves no token"),
    ],
)  # fmt: skip
def test_nothing_is_computed_for_what_cannot_be(runner, wrong, told):
    runner.forward = None
    arguments = {"prompts": PROMPTS, "asked": [(WARM, 2)], "max_new_tokens": 3, "generator_of": generator_of, **wrong}
    with pytest.raises(ValueError, match=told):
        draw_samples(runner, arguments.pop("prompts"), arguments.pop("asked"), **arguments)
