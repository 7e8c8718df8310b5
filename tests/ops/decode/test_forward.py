"""The torch runner against transformers: every family, however the same texts are read."""

import pytest
import torch

from assay.ops.decode.forward import TorchRunner
from assay.ops.decode.session import Session, strip_padding
from assay.ops.decode.weights import open_weights, weights_of
from assay.ops.kv.cache import make_cache
from assay.ops.models.dense import load_dense
from assay.ops.prune.depth import drop_layers
from assay.ops.quantize.grid import Format
from assay.ops.quantize.rtn import rtn
from assay.ops.quantize.write import save_packed

TEXT = torch.randint(3, 128, (40,), generator=torch.Generator().manual_seed(1)).tolist()
TEXTS = [TEXT, TEXT[7:12], TEXT[20:38]]


def close(found, expected, tolerance=1e-4):
    assert found.shape == expected.shape
    assert not len(found) or (found - expected).abs().max() < tolerance


def test_a_whole_text_has_the_logits_of_transformers(decoder, run, full_logits):
    expected = full_logits(decoder, TEXT)
    found = Session(run(decoder), capacity=40).read([TEXT], keep=40)[0]
    assert found.dtype == torch.float32
    close(found, expected)
    assert expected.std() > 1  # the bound means something


@pytest.mark.parametrize("fault", ["positions", "stale row", "window"])
def test_the_decoders_are_ones_in_which_a_fault_shows(make_decoder, run, full_logits, fault):
    runner, expected = run(make_decoder("mistral with a window")), full_logits(make_decoder("mistral with a window"), TEXT)
    if fault == "window":
        runner.shape = runner.shape._replace(layers=tuple(layer._replace(window=7) for layer in runner.shape.layers))
        runner.windows = (7,)
    session = Session(runner, capacity=48)
    session.read([TEXT[:30]])
    if fault == "positions":
        session.cache.positions_next[0] -= 1
    if fault == "stale row":
        session.read([[5]])
    assert (session.read([TEXT[30:]], keep=10)[0] - expected[30:]).abs().max() > 0.1


@pytest.mark.usefixtures("unchecked_shapes")  # for time; the other tests check them
def test_token_by_token_and_in_chunks_the_logits_are_the_same(decoder, run, full_logits):
    runner, expected = run(decoder), full_logits(decoder, TEXT)
    session = Session(runner, capacity=40)
    close(torch.cat([session.read([[token]])[0] for token in TEXT]), expected)
    for chunk in (7, 16):
        close(Session(runner, capacity=40, chunk=chunk).read([TEXT], keep=40)[0], expected)
        close(Session(runner, capacity=40, chunk=chunk).read([TEXT], keep=11)[0], expected[-11:])


def test_a_batch_of_unequal_texts_reads_each_as_if_alone(decoder, run, full_logits):
    runner = run(decoder)
    session = Session(runner, rows=3, capacity=40)
    for text, found in zip(TEXTS, session.read(TEXTS, keep=[len(text) for text in TEXTS]), strict=True):
        close(found, full_logits(decoder, text))
    # Ragged steps, with rows that wait: the first is full.
    grown = [*TEXTS[1], 9, 8, 7]
    _, first, second = session.read([[], [9, 8, 7], [77]], keep=[0, 2, 1])
    close(first, full_logits(decoder, grown)[-2:])
    close(second, full_logits(decoder, [*TEXTS[2], 77])[-1:])
    empty, third, _ = session.read([[], [6], []])
    close(third, full_logits(decoder, [*grown, 6])[-1:])
    assert empty.shape == (0, 128)
    assert session.lengths == [40, 9, 19]


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_has_the_logits_that_transformers_gives_to_its_real_tokens(decoder, run, side, full_logits):
    width = max(map(len, TEXTS))
    ids, mask = torch.zeros(3, width, dtype=torch.long), torch.zeros(3, width, dtype=torch.long)
    for row, text in enumerate(TEXTS):
        where = slice(width - len(text), width) if side == "left" else slice(0, len(text))
        ids[row, where], mask[row, where] = torch.tensor(text), 1
    with torch.inference_mode():
        padded = decoder(input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0), use_cache=False).logits
    texts = strip_padding(ids, mask)
    assert texts == TEXTS
    found = Session(run(decoder), rows=3, capacity=40).read(texts, keep=[len(text) for text in texts])
    for row in range(3):
        close(found[row], padded[row][mask[row].bool()])


def test_after_rollbacks_of_any_number_the_logits_are_those_of_a_full_forward(decoder, run, full_logits):
    session = Session(run(decoder), rows=2, capacity=48)
    session.read([TEXT[:5], [3, 4]])
    place = 5
    expected = full_logits(decoder, TEXT)
    for back in (0, 1, 2, 3, 4, 0, 4, 3):
        session.read([[*TEXT[place : place + 4 - back], *[60 + back] * back], [50]])
        session.rollback([back, 1])
        place += 4 - back
        close(session.read([TEXT[place : place + 1], []])[0], expected[place : place + 1])
        place += 1
    close(session.read([[], [9]])[1], full_logits(decoder, [3, 4, 9])[-1:])


def test_rows_that_change_places_go_on_with_their_own_texts(decoder, run, full_logits):
    session = Session(run(decoder), rows=3, capacity=48)
    session.read(TEXTS, keep=0)
    session.reorder([1, 1, 0])
    assert session.lengths == [5, 5, 40]
    found = session.read([[9], [10], [11]])
    for logits, text in zip(found, ([*TEXTS[1], 9], [*TEXTS[1], 10], [*TEXT, 11]), strict=True):
        close(logits, full_logits(decoder, text)[-1:])


@pytest.mark.parametrize("kv_format", ["fp8_e4m3", "int8"])
def test_a_quantized_cache_gives_what_the_same_cache_gives_in_transformers(decoder, run, full_logits, kv_format):
    cache, expected = make_cache(decoder, kv_format), []
    pieces = [TEXT[:9], *([token] for token in TEXT[9:16])]
    with torch.inference_mode():
        for piece in pieces:
            start = cache.get_seq_length()
            positions = torch.arange(start, start + len(piece)).unsqueeze(0)
            expected.append(decoder(input_ids=torch.tensor([piece]), cache=cache, position_ids=positions).logits[0])
    session = Session(run(decoder), capacity=16, kv_format=kv_format)
    found = [session.read([piece], keep=len(piece))[0] for piece in pieces]
    # A rounding of 1e-6 now and then moves a stored value to the next code; nearly every place is equal all the same.
    errors = (torch.cat(found) - torch.cat(expected)).abs().amax(dim=-1)
    assert (errors < 1e-3).float().mean() > 0.8
    assert (torch.cat(expected) - full_logits(decoder, TEXT[:16])).abs().max() > 0.05  # the format is in force
    assert session.cache.size_bytes == cache.nbytes()


@pytest.mark.parametrize("kv_format", [None, "fp8_e4m3"])
def test_static_shapes_give_the_same_logits_with_rows_that_are_idle_or_read_less(decoder, run, kv_format):
    runner = run(decoder)
    sessions = [Session(runner, rows=3, capacity=48, kv_format=kv_format) for _ in range(2)]
    for session in sessions:
        session.read([TEXT[:13], TEXT[2:4], TEXT[5:25]])
    dynamic, static = sessions
    for width, counts in ((1, [1, 1, 1]), (3, [3, 0, 1]), (2, [1, 2, 0]), (1, [0, 1, 1])):
        ids = [TEXT[30 : 30 + count] for count in counts]
        expected = dynamic.read(ids, keep=counts)
        start = torch.tensor(static.lengths).unsqueeze(-1) + torch.arange(width)
        padded = torch.tensor([[*row, *[99] * (width - len(row))] for row in ids])
        found = runner.forward_static(static.cache, padded, start, start)
        static.cache.append(ids, keep=counts)
        assert found.shape == (3, width, 128) and found.isfinite().all()
        for row, count in enumerate(counts):
            close(found[row, :count], expected[row], 1e-4 if kv_format is None else 1.0)


def test_static_shapes_never_look_at_a_value(make_decoder, run):
    # Under "meta" every tensor is a shape alone, so that reading a value fails, as it would while a graph is captured.
    for name in ("gemma3", "mixtral with a window"):
        runner = run(make_decoder(name).to("meta"), device="meta")
        cache = runner.cache(rows=2, capacity=16, format="int8")
        ids = torch.zeros(2, 3, dtype=torch.long, device="meta")
        runner.ropes = tuple(rope._replace(inverse_frequencies=rope.inverse_frequencies.to("meta")) for rope in runner.ropes)
        assert runner.forward_static(cache, ids, ids, ids).shape == (2, 3, 128)


def test_after_an_eviction_positions_go_on_and_slots_do_not(tl8, run):
    # Two sinks and the six latest tokens stay; a new token's position is its place in the text, not in the cache.
    session = Session(run(tl8), capacity=9)
    found = []
    for token in TEXT:
        found.append(session.read([[token]])[0])
        held = session.cache.counts[0]
        if held > 8:
            session.cache.retain([[0, 1, *range(held - 6, held)]])
    place = torch.arange(40)
    mask = (place <= place.unsqueeze(-1)) & ((place < 2) | (place > place.unsqueeze(-1) - 7))
    with torch.inference_mode():
        expected = tl8(input_ids=torch.tensor([TEXT]), attention_mask=mask[None, None], use_cache=False).logits[0]
    close(torch.cat(found), expected)
    assert session.lengths == [40]
    with pytest.raises(ValueError, match="8 of them since before others were evicted"):
        session.rollback([1])


@pytest.mark.usefixtures("unchecked_shapes")
def test_a_model_with_layers_removed_reads_its_cache_as_without_one(make_llama, run, full_logits):
    # Layers that keep their old numbers share or miss a cache slot: here a layer is known by its place alone.
    for dropped in ([0], [1, 2]):
        model = make_llama()
        drop_layers(model, dropped)
        session = Session(run(model), capacity=40)
        assert len(session.cache.keys) == 4 - len(dropped)
        found = torch.cat([session.read([[token]])[0] for token in TEXT])
        close(found, full_logits(model, TEXT))


def test_bfloat16_rounds_where_transformers_does(decoder, run, full_logits, tmp_path):
    decoder.save_pretrained(tmp_path)  # loading, unlike a cast, leaves the frequencies of the rotary embedding in float32
    theirs = load_dense(tmp_path, dtype=torch.bfloat16)
    theirs.set_experts_implementation("eager")
    runner = run(decoder, dtype=torch.bfloat16)
    assert runner.path == "torch bfloat16, float32 weights"
    found, rounded = Session(runner, capacity=40).read([TEXT], keep=40)[0], full_logits(theirs, TEXT).float()
    assert (rounded - full_logits(decoder, TEXT)).abs().max() > 0.05
    close(found, rounded, 1e-3)


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("policy", [("quantize", "quantize"), ("quantize", "untie")])
def test_a_packed_checkpoint_runs_as_the_model_that_it_dequantizes_to(make_decoder, full_logits, tmp_path, bits, symmetric, policy):
    model = make_decoder("qwen2 with a bias")
    format = Format("int", bits, 32, symmetric=symmetric)
    rounded = rtn(model, format, embeddings=policy[0], head=policy[1])
    expected = full_logits(model, TEXT)
    save_packed(model, None, tmp_path, rounded.layers)
    shape, weights = open_weights(tmp_path)
    assert weights.forms == f"int{bits}"
    runner = TorchRunner(shape, weights)
    assert runner.path == f"torch float32, {weights.forms} weights"
    close(Session(runner, capacity=40).read([TEXT], keep=40)[0], expected)


def test_a_saved_checkpoint_runs_as_the_model_in_memory(decoder, full_logits, tmp_path):
    decoder.save_pretrained(tmp_path)
    runner = TorchRunner(*open_weights(tmp_path))
    assert runner.path == "torch float32"
    close(Session(runner, capacity=40).read([TEXT], keep=40)[0], full_logits(load_dense(tmp_path), TEXT))


def test_weights_in_the_dtype_asked_for_are_shared_and_not_copied(tl8):
    shape, weights = weights_of(tl8)
    held = TorchRunner(shape, weights).weights
    assert held.blocks[1].q.weight.data_ptr() == tl8.model.layers[1].self_attn.q_proj.weight.data_ptr()
    assert held.head.weight.data_ptr() == tl8.lm_head.weight.data_ptr()


def test_nothing_that_an_unused_slot_holds_reaches_a_text(tl8, run, full_logits):
    session = Session(run(tl8), rows=2, capacity=40)
    session.cache.keys.normal_(0, 1e3)
    session.cache.values.normal_(0, 1e3)
    session.cache.positions.random_(0, 1000)
    session.read([TEXT[:4], TEXT[:9]])
    found = session.read([[7, 8], [5]], keep=[2, 1])
    close(found[0], full_logits(tl8, [*TEXT[:4], 7, 8])[-2:])
    close(found[1], full_logits(tl8, [*TEXT[:9], 5])[-1:])
