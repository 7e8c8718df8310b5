"""The time that a forward takes at least, worked by hand, and the ridge; FLOPs against what a model really multiplies."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from assay.ops.cost.roofline import intensity, largest_batch, ridge, seconds_per_token, step_time, texts_in_memory, tokens_per_second
from assay.ops.cost.shape import Decoder, decode_flops, prefill_flops

AMOUNT = st.floats(0, 1e15)
RATE = st.floats(1e6, 1e16)
H100 = {"bandwidth": 3.35e12, "rate": 989e12}
LLAMA_70B = Decoder(80, 8192, 28_672, 64, 8, 128, 128_256, tied=False)


def test_c01_a_70b_step_on_h100_worked_by_hand():
    """141.1 GB over 3.35 TB/s are 42.1 ms; 128 K of context are 43 GB more; 2 FLOPs a weight at batch 1 would take a seventh of a millisecond."""
    step = step_time(weight_bytes=141.1e9, kv_bytes=0, flops=2 * 70.55e9, **H100)
    assert (step.seconds, step.limit) == (pytest.approx(0.04212, rel=1e-3), "weights")
    assert step.compute_seconds == pytest.approx(1.4267e-4, rel=1e-3)
    long = step_time(weight_bytes=141.1e9, kv_bytes=320 * 1024 * 131_072, flops=2 * 70.55e9, **H100)
    assert long.seconds == pytest.approx(42.12e-3 + 12.82e-3, rel=1e-3) and long.limit == "weights"


@pytest.mark.parametrize(("kv", "flops", "launch", "limit", "seconds"), [
    (0, 0, 0, "weights", 2.0), (6, 0, 0, "kv", 5.0), (0, 100, 0, "compute", 10.0), (0, 0, 3.0, "launch", 3.0), (4, 40, 0, "weights", 4.0),
])  # fmt: skip
def test_the_part_that_takes_longest_sets_the_time(kv, flops, launch, limit, seconds):
    found = step_time(weight_bytes=4, kv_bytes=kv, flops=flops, bandwidth=2, rate=10, launch=launch)
    assert (found.limit, found.seconds) == (limit, seconds)


@given(weights=AMOUNT, kv=AMOUNT, flops=AMOUNT, more=AMOUNT, bandwidth=RATE, rate=RATE)
def test_more_work_never_takes_less_and_a_faster_device_never_more(weights, kv, flops, more, bandwidth, rate):
    def seconds(weights=weights, kv=kv, flops=flops, bandwidth=bandwidth, rate=rate):
        return step_time(weight_bytes=weights, kv_bytes=kv, flops=flops, bandwidth=bandwidth, rate=rate).seconds

    assert seconds(weights=weights + more) >= seconds() and seconds(kv=kv + more) >= seconds() and seconds(flops=flops + more) >= seconds()
    assert seconds(bandwidth=2 * bandwidth, rate=2 * rate) == pytest.approx(seconds() / 2)


def test_tokens_per_forward_divide_the_time_of_a_token_and_multiply_the_rate():
    assert seconds_per_token(0.04, tokens_per_forward=2.5) == 0.016
    assert tokens_per_second(0.04, batch=8, tokens_per_forward=2.5) == 500
    with pytest.raises(ValueError, match="tokens_per_forward=0"):
        seconds_per_token(1.0, tokens_per_forward=0)


def test_c02_ridge_of_h100_is_295_and_of_h200_206():
    assert ridge(989e12, 3.35e12) == pytest.approx(295, abs=0.5)
    assert ridge(989e12, 4.8e12) == pytest.approx(206, abs=0.5)


def test_d10_a_tree_of_60_nodes_at_ridge_295_takes_4_texts_and_8_texts_of_64_nodes_are_past_it():
    assert largest_batch(295, nodes=60) == 4
    assert intensity(4 * 60) == 240 <= 295 < intensity(5 * 60) and intensity(8 * 64) == 512 > 295
    assert largest_batch(295, nodes=512) == 0


def test_weights_in_4_bits_quarter_the_batch_inside_the_ridge():
    assert largest_batch(295) == 295 and largest_batch(295, bytes_per_weight=0.5) == 73


@given(ridge=st.floats(0.5, 1e4), nodes=st.integers(1, 1000), size=st.floats(0.25, 4))
def test_the_largest_batch_is_inside_the_ridge_and_the_next_is_not(ridge, nodes, size):
    batch = largest_batch(ridge, nodes=nodes, bytes_per_weight=size)
    assert intensity(batch * nodes, bytes_per_weight=size) <= ridge * (1 + 1e-9)
    assert intensity((batch + 1) * nodes, bytes_per_weight=size) > ridge * (1 - 1e-9)


def test_texts_that_fit_beside_the_weights():
    """24 GiB, 16 GiB of weights, 16 GiB a text of 128 K: none fits in 16 bits, and one in 8."""
    assert texts_in_memory(24 * 2**30, weight_bytes=16 * 2**30, kv_bytes_per_token=128 * 1024, context=131_072) == 0
    assert texts_in_memory(24 * 2**30, weight_bytes=16 * 2**30, kv_bytes_per_token=64 * 1024, context=131_072) == 1
    assert texts_in_memory(2**30, weight_bytes=2**31, kv_bytes_per_token=1, context=1) == 0


def test_a_device_that_does_nothing_is_refused():
    with pytest.raises(ValueError, match="bandwidth=0"):
        step_time(weight_bytes=1, kv_bytes=1, flops=1, bandwidth=0, rate=1)
    with pytest.raises(ValueError, match="none of them can be below 0"):
        step_time(weight_bytes=-1, kv_bytes=1, flops=1, bandwidth=1, rate=1)


def test_llama_3_1_70b_and_8b_have_the_weights_that_their_names_say():
    assert LLAMA_70B.parameters == pytest.approx(70.55e9, rel=1e-3)
    small = Decoder(32, 4096, 14_336, 32, 8, 128, 128_256, tied=False)
    assert small.parameters == pytest.approx(8.03e9, rel=1e-3) and small.matmul_parameters < small.parameters
    nemotron = Decoder(32, 6144, 24_576, 48, 8, 128, 256_000, tied=False, gated=False)
    assert nemotron.parameters == pytest.approx(15.6e9, rel=1e-2)


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_are_those_of_the_model_but_for_norms(make_llama, tied):
    model = make_llama(tied=tied)
    shape = Decoder(4, 64, 128, 4, 2, 16, 128, tied=tied)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters() if parameter.dim() == 2)


@pytest.mark.parametrize("tokens", [1, 7])
def test_flops_are_those_that_torch_counts(make_llama, tokens):
    """Eager attention of one read multiplies the whole square, a causal one half of it: so the reference is told apart from the causal count."""
    model = make_llama()
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        model(input_ids=torch.ones(1, tokens, dtype=torch.int64), use_cache=False)
    shape = Decoder(4, 64, 128, 4, 2, 16, 128, tied=False)
    rotary = counter.get_flop_counts()["Global"]
    attention = shape.attention_flops_per_context_token
    whole = decode_flops(shape.matmul_parameters, attention, tokens=tokens, context=tokens)
    assert sum(rotary.values()) == pytest.approx(whole, rel=2e-3)  # the rotary embedding's small product is not counted by us
    causal = prefill_flops(shape.block_parameters, shape.head_parameters, attention, batch=1, tokens=tokens)
    assert causal == whole - (tokens - 1) * 2 * shape.head_parameters - attention * tokens * (tokens - 1) / 2
