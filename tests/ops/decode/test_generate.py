"""Plain decoding against a forward without a cache, and its stops, clock and refusals."""

from itertools import count

import pytest
import torch

from assay.ops.decode.generate import generate

PROMPT = [5, 17, 90, 3, 44]


def full_logits(model, tokens):
    with torch.inference_mode():
        return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]


def test_every_step_has_the_logits_of_a_forward_without_cache(tl8, record_forwards):
    forwards = record_forwards(tl8)
    result = generate(tl8, PROMPT, max_new_tokens=32)
    seen = list(forwards)
    expected = full_logits(tl8, PROMPT + result.tokens)
    assert [start for start, _ in seen] == list(range(len(PROMPT) - 1, len(PROMPT) + 31))
    for start, logits in seen:
        assert logits.shape == (1, 128)  # of the last position alone, in the prefill too
        assert torch.allclose(logits[0], expected[start], atol=1e-4)
    assert result.tokens == expected[len(PROMPT) - 1 : -1].argmax(-1).tolist()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_sliding_window_model_decodes_as_without_cache(make_mistral, record_forwards, attention):
    model = make_mistral(attention=attention)
    forwards = record_forwards(model)
    result = generate(model, PROMPT, max_new_tokens=16)
    seen = list(forwards)
    expected = full_logits(model, PROMPT + result.tokens)
    for start, logits in seen:
        assert torch.allclose(logits[0], expected[start], atol=1e-4)


def test_a_tensor_and_a_list_are_the_same_prompt(tl8):
    assert generate(tl8, torch.tensor([PROMPT]), max_new_tokens=4).tokens == generate(tl8, PROMPT, max_new_tokens=4).tokens


def test_the_first_end_token_is_the_last_of_the_text(tl8):
    free = generate(tl8, PROMPT, max_new_tokens=12).tokens
    end = free[5]
    assert generate(tl8, PROMPT, max_new_tokens=12, eos_ids={end}).tokens == free[: free.index(end) + 1]
    assert generate(tl8, PROMPT, max_new_tokens=12, eos_ids={free[0]}).tokens == free[:1]


def test_a_seed_gives_the_same_text_again_and_another_seed_another(tl8):
    def draw(seed):
        return generate(tl8, PROMPT, max_new_tokens=16, temperature=3.0, generator=torch.Generator().manual_seed(seed)).tokens

    assert draw(1) == draw(1) != draw(2)


def test_flat_logits_with_a_seed_give_many_distinct_tokens(tl8):
    with torch.no_grad():
        tl8.lm_head.weight.zero_()
    tokens = generate(tl8, PROMPT, max_new_tokens=16, temperature=1.0, generator=torch.Generator().manual_seed(7)).tokens
    assert len(set(tokens)) > 8


def test_ids_beyond_the_tokenizer_never_come(tl8):
    with torch.no_grad():
        tl8.lm_head.weight[120:] = 50 * tl8.lm_head.weight[:8]  # the padding of the head shouts
    drawn = generate(tl8, PROMPT, max_new_tokens=40, temperature=50.0, generator=torch.Generator().manual_seed(0))
    assert max(drawn.tokens) >= 120
    for temperature in (0.0, 50.0):
        cut = generate(tl8, PROMPT, max_new_tokens=40, temperature=temperature, generator=torch.Generator().manual_seed(0), vocabulary=120)
        assert max(cut.tokens) < 120


def test_the_clock_is_read_around_the_prefill_and_at_the_end(tl8):
    ticks = count(0, 10)
    result = generate(tl8, PROMPT, max_new_tokens=4, clock=lambda: float(next(ticks)))
    assert (result.prefill_seconds, result.decode_seconds) == (10, 10)
    assert next(ticks) == 30  # three readings, none per token


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"prompt_ids": []}, "no tokens"),
        ({"prompt_ids": [1, 128]}, "128, outside"),
        ({"prompt_ids": [-1]}, "-1, outside"),
        ({"prompt_ids": torch.zeros(2, 3, dtype=torch.long)}, "batch of 2"),
        ({"temperature": 1.0}, "generator"),
        ({"temperature": -1.0}, "temperature=-1"),
        ({"vocabulary": 0}, "vocabulary=0"),
    ],
)
def test_a_request_that_cannot_work_is_refused_before_the_first_forward(tl8, record_forwards, wrong, message):
    forwards = record_forwards(tl8)
    request = {"prompt_ids": PROMPT, "max_new_tokens": 4, **wrong}
    with pytest.raises(ValueError, match=message):
        generate(tl8, request.pop("prompt_ids"), **request)
    assert not forwards


def test_a_model_in_training_mode_is_refused(tl8):
    with pytest.raises(ValueError, match="training mode"):
        generate(tl8.train(), PROMPT, max_new_tokens=4)
