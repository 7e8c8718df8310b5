"""Caches of fewer bits: what is stored, what attention gets, and taking rows back."""

import pytest
import torch
from transformers import LlamaConfig, MistralConfig, MistralForCausalLM

from assay.ops.kv.cache import LAYERS, KvCache, from_int8_rows, make_cache, to_e4m3, to_int8_rows

IDS = torch.arange(3, 43).unsqueeze(0)
FORMATS = sorted(LAYERS)


@pytest.fixture
def sliding(make_llama):
    """A Mistral of TL8's weights whose attention sees 6 tokens."""
    llama = make_llama()
    keep = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "rms_norm_eps",
    )
    model = MistralForCausalLM(MistralConfig(**{key: getattr(llama.config, key) for key in keep}, sliding_window=6))
    model.load_state_dict(llama.state_dict())
    return model.eval()


@torch.no_grad()
def read(model, cache, ids, start):
    """Logits of ``ids`` at their true positions."""
    return model(ids, cache=cache, position_ids=torch.arange(start, start + ids.shape[1]).unsqueeze(0), use_cache=True).logits


def stored(cache):
    """Every tensor of every layer, as bytes."""
    return [
        getattr(layer, part).contiguous().view(torch.uint8)
        for layer in cache.layers
        for part in getattr(layer, "parts", ("keys", "values"))
    ]


def test_overflow_to_e4m3_is_448_and_nan_stays_nan():
    """Saturation is left open by the format: some builds turn 449 into NaN."""
    found = to_e4m3(torch.tensor([448.0, 449.0, 464.0, 1000.0, -1000.0, torch.inf, -torch.inf, torch.nan])).float()
    assert found[:7].tolist() == [448, 448, 448, 448, -448, 448, -448] and found[7].isnan()


def test_e4m3_worked_by_hand():
    # three bits of mantissa: between 1 and 2 the step is 1/8, ties go to the even one; the smallest subnormal is 2^-9
    values = torch.tensor([1.05, 1.0625, 1.1875, 17.0, 2.0**-9, 2.0**-10, 0.0])
    assert to_e4m3(values).float().tolist() == [1.0, 1.0, 1.25, 16.0, 2.0**-9, 0.0, 0.0]


def test_int8_rows_worked_by_hand_with_zeros_and_values_that_are_not_finite():
    found = to_int8_rows(torch.tensor([[127.0, -63.6, 0.4], [0.0, 0.0, 0.0], [1.0, torch.nan, 2.0], [1.0, torch.inf, 2.0]]))
    assert found.codes[0].tolist() == [127, -64, 0] and found.scales[0].item() == 1
    back = from_int8_rows(found)
    assert back[1].tolist() == [0, 0, 0]
    assert back[2].isnan().any() and back[3].isnan().any()  # never hidden as a number


def test_no_int8_value_moves_by_more_than_half_a_scale():
    rows = torch.randn(4, 3, 50, 16, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 4, 50).unsqueeze(1)
    found = to_int8_rows(rows)
    assert ((from_int8_rows(found) - rows).abs() <= found.scales.float() * 0.5001 + 1e-12).all()
    assert found.codes.abs().max() == 127


@torch.no_grad()
def test_decoding_from_an_unquantized_cache_gives_the_logits_of_one_forward(tl8):
    cache = make_cache(tl8)
    logits = [read(tl8, cache, IDS[:, :24], 0)] + [read(tl8, cache, IDS[:, at : at + 1], at) for at in range(24, 40)]
    torch.testing.assert_close(torch.cat(logits, 1), tl8(IDS).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("format", FORMATS)
def test_one_long_call_stores_what_many_short_ones_store_and_returns_it_quantized(format, tl8):
    """Keys of decoding are quantized like those of prefill, and attention gets the stored values, the new row too."""
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(2, 2, 33, 16, generator=generator) * 3 for _ in range(2))
    whole, streamed = make_cache(tl8, format), make_cache(tl8, format)
    seen = whole.update(keys, values, 0)
    for at in range(33):
        last = streamed.update(keys[:, :, at : at + 1], values[:, :, at : at + 1], 0)
    assert all(torch.equal(a, b) for a, b in zip(stored_layer(whole), stored_layer(streamed), strict=True))
    for got, streamed_got, given in zip(seen, last, (keys, values), strict=True):
        assert torch.equal(got, streamed_got) and got.dtype == given.dtype
        error = (got - given).abs().amax(dim=(0, 1, 3))
        assert (error > 0).all()  # every row, the last one too, was really rounded
        assert (error < 0.5).all()


def stored_layer(cache, index=0):
    layer = cache.layers[index]
    return [getattr(layer, part).contiguous().view(torch.uint8) for part in layer.parts]


@pytest.mark.parametrize("format", FORMATS)
def test_a_model_read_at_once_or_token_by_token_gives_the_same_logits(format, tl8):
    whole, streamed = make_cache(tl8, format), make_cache(tl8, format)
    at_once = read(tl8, whole, IDS, 0)
    one_by_one = torch.cat([read(tl8, streamed, IDS[:, at : at + 1], at) for at in range(IDS.shape[1])], dim=1)
    # the matrix products differ in the last bit, and a value at the edge of two codes may then fall to either
    differing = sum(int((a != b).sum()) for a, b in zip(stored(whole), stored(streamed), strict=True))
    assert differing <= 0.002 * sum(part.numel() for part in stored(whole))
    agree = torch.nn.functional.cosine_similarity(at_once, one_by_one, dim=-1)
    assert agree.min() > 0.99


@torch.no_grad()
@pytest.mark.parametrize(("format", "least", "most"), [("fp8_e4m3", 1e-4, 2.0), ("int8", 1e-5, 0.5)])
def test_a_quantized_cache_changes_the_logits_a_little_and_not_nothing(format, least, most, tl8):
    exact = tl8(IDS).logits
    error = (read(tl8, make_cache(tl8, format), IDS, 0) - exact).abs().max()
    assert least < error < most * exact.std()


@pytest.mark.parametrize(("format", "row"), [("fp8_e4m3", 16), ("int8", 16 + 2), (None, 4 * 16)])
def test_reported_bytes_are_those_of_the_tensors_held(format, row, tl8):
    """A cache that rounds and stores full precision would report bytes that do not exist."""
    cache = make_cache(tl8, format)
    assert cache.nbytes() == 0
    read(tl8, cache, IDS, 0)
    layers, heads, both = 4, 2, 2
    assert cache.nbytes() == layers * heads * both * IDS.shape[1] * row
    held = {part: getattr(cache.layers[0], part).dtype for part in ("keys", "values")}
    assert set(held.values()) == {{"fp8_e4m3": torch.float8_e4m3fn, "int8": torch.int8, None: torch.float32}[format]}
    assert cache.nbytes() == sum(part.numel() for part in stored(cache))


@pytest.mark.parametrize("format", [*FORMATS, None])
@pytest.mark.parametrize("rejected", [0, 1, 4])
def test_rejected_rows_are_removed_exactly_and_decoding_goes_on_at_the_true_position(format, rejected, tl8):
    """Positions come from the number of tokens, and a row left behind after a rejection would be attended to."""
    cache, fresh = make_cache(tl8, format), make_cache(tl8, format)
    read(tl8, cache, IDS[:, :20], 0)
    before = [part.clone() for part in stored(cache)]
    if rejected:
        read(tl8, cache, torch.full((1, rejected), 99), 20)
    cache.crop(-rejected)
    assert cache.get_seq_length() == 20
    assert all(torch.equal(a, b) for a, b in zip(stored(cache), before, strict=True))
    found = torch.cat([read(tl8, cache, IDS[:, at : at + 1], at) for at in range(20, 30)], dim=1)
    read(tl8, fresh, IDS[:, :20], 0)
    expected = torch.cat([read(tl8, fresh, IDS[:, at : at + 1], at) for at in range(20, 30)], dim=1)
    assert torch.equal(found, expected)
    if format is None:
        torch.testing.assert_close(found, tl8(IDS[:, :30]).logits[:, 20:], atol=1e-4, rtol=0)


@pytest.mark.parametrize("format", FORMATS)
def test_cropping_what_is_not_there_is_an_error(format, tl8):
    cache = make_cache(tl8, format)
    cache.crop(0)
    read(tl8, cache, IDS[:, :5], 0)
    for wrong in (3, -6):
        with pytest.raises(ValueError, match=rf"crop\({wrong}\) of a cache of 5 tokens"):
            cache.crop(wrong)
    cache.crop(-5)
    assert cache.get_seq_length() == 0
    assert torch.equal(read(tl8, cache, IDS[:, :5], 0), read(tl8, make_cache(tl8, format), IDS[:, :5], 0))


@pytest.mark.parametrize("format", FORMATS)
def test_rows_of_a_batch_can_be_chosen_repeated_and_forgotten(format, tl8):
    batch = torch.stack([IDS[0, :8], IDS[0, 8:16]])
    cache = make_cache(tl8, format)
    read(tl8, cache, batch, 0)
    both = [part.clone() for part in stored_layer(cache)]
    cache.reorder_cache(torch.tensor([1, 0]))
    assert all(torch.equal(a, b.flip(0)) for a, b in zip(stored_layer(cache), both, strict=True))
    cache.batch_select_indices(torch.tensor([0]))
    cache.batch_repeat_interleave(3)
    assert all(torch.equal(a, b[1:].repeat_interleave(3, 0)) for a, b in zip(stored_layer(cache), both, strict=True))
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.nbytes() == 0
    assert torch.equal(read(tl8, cache, batch, 0), read(tl8, make_cache(tl8, format), batch, 0))


@torch.no_grad()
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("rejected", [0, 3])
def test_a_sliding_window_model_decodes_in_its_window_and_rolls_back(format, rejected, sliding):
    """Window 6: the stored cache keeps more rows than the window shows, and the mask must still hide them."""
    cache = make_cache(sliding, format)
    logits = [read(sliding, cache, IDS[:, :20], 0)]
    if rejected:
        read(sliding, cache, torch.full((1, rejected), 99), 20)
        cache.crop(-rejected)
    logits += [read(sliding, cache, IDS[:, at : at + 1], at) for at in range(20, 40)]
    exact, wide = sliding(IDS).logits, None
    error = (torch.cat(logits, 1) - exact).abs().max()
    sliding.config.sliding_window = None
    wide = (sliding(IDS).logits - exact).abs().max()  # what seeing everything would do
    assert error < 0.2 * wide


@torch.no_grad()
def test_an_unquantized_sliding_window_cache_gives_the_logits_of_one_forward(sliding):
    cache = make_cache(sliding)
    logits = [read(sliding, cache, IDS[:, :20], 0)] + [read(sliding, cache, IDS[:, at : at + 1], at) for at in range(20, 40)]
    torch.testing.assert_close(torch.cat(logits, 1), sliding(IDS).logits, atol=1e-4, rtol=0)
    assert cache.nbytes() == 4 * 2 * 2 * 5 * 16 * 4  # of the window of 6, the 5 rows that the next token sees


def test_an_unknown_format_and_a_model_without_keys_and_values_are_refused(tl8):
    with pytest.raises(ValueError, match="no cache format 'int4'; fp8_e4m3, int8 and None"):
        make_cache(tl8, "int4")
    tl8.config = LlamaConfig(num_hidden_layers=2)
    tl8.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(ValueError, match="keeps its past in LinearAttentionLayer"):
        make_cache(tl8, "int8")


def test_a_cache_is_a_transformers_cache_that_can_be_rolled_back(tl8):
    for format in (None, *FORMATS):
        cache = make_cache(tl8, format)
        assert isinstance(cache, KvCache) and cache.is_croppable and len(cache.layers) == 4
