"""The preallocated cache alone: slots, positions, and rows that come and go."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.ops.decode.architecture import Architecture, Layer, Rope
from assay.ops.decode.cache import Cache

SHAPE = Architecture(
    family="llama", layers=(Layer(None, 0),) * 2, ropes=(Rope(torch.ones(2), 1.0),), hidden=8, heads=4, kv_heads=2, head_dim=4, intermediate=8,
    vocabulary=100, norm_eps=1e-5, norm_offset=0.0, qk_norm=False, sandwich=False, activation="silu", attention_scale=0.5, embedding_scale=1.0,
    experts=0, experts_per_token=0, tied=False,
)  # fmt: skip


def give(cache, ids, keep=None):
    """Append, and store each token's id as its key and its negative as its value."""
    step = cache.append(ids, keep=keep or [0] * len(ids))
    for layer in range(2):
        keys = step.ids.float()[:, None, None].expand(-1, 2, 4) + layer
        cache.write(layer, step, keys, -keys)
    return step


def texts(cache, layer=0):
    """What each row holds, from keys and values both."""
    keys, values = cache.read(layer, cache.capacity)
    assert torch.equal(keys, -values)
    return [(keys[row, 1, :count, 3] - layer).round().int().tolist() for row, count in enumerate(cache.counts)]


def test_a_step_worked_by_hand():
    cache = Cache(SHAPE, rows=3, capacity=6)
    cache.append([[7], [8, 9], []], keep=[0, 0, 0])
    step = cache.append([[10, 11, 12], [], [13, 14]], keep=[2, 0, 1])
    assert step.ids.tolist() == [10, 11, 12, 13, 14]
    assert step.rows.tolist() == [0, 0, 0, 2, 2]
    assert step.slots.tolist() == step.positions.tolist() == [1, 2, 3, 0, 1]
    assert step.keep.tolist() == [1, 2, 4]
    assert cache.counts == cache.positions_next == [4, 2, 2]
    assert cache.positions[0, :4].tolist() == [0, 1, 2, 3]


moves = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.lists(st.lists(st.integers(1, 90), max_size=3), min_size=3, max_size=3)),
        st.tuples(st.just("rollback"), st.lists(st.integers(0, 3), min_size=3, max_size=3)),
        st.tuples(st.just("reorder"), st.lists(st.integers(0, 2), min_size=3, max_size=3)),
        st.tuples(st.just("retain"), st.lists(st.lists(st.integers(0, 9), max_size=6), min_size=3, max_size=3)),
    ),
    max_size=8,
)


@settings(max_examples=60, deadline=None)
@given(moves=moves, format=st.sampled_from([None, "int8", "fp8_e4m3"]))
def test_rows_hold_what_lists_would(moves, format):
    cache, lists = Cache(SHAPE, rows=3, capacity=24, format=format), [[] for _ in range(3)]  # (token, position)
    following, fixed = [0, 0, 0], [0, 0, 0]
    for move, argument in moves:
        if move == "append":
            # Powers of two are stored exactly by every format.
            argument = [[2 ** (token % 6) for token in row] for row in argument]
            give(cache, argument)
            for row, new in enumerate(argument):
                lists[row] += [(token, following[row] + index) for index, token in enumerate(new)]
                following[row] += len(new)
        elif move == "rollback":
            counts = [min(count, len(held) - kept) for count, held, kept in zip(argument, lists, fixed, strict=True)]
            cache.rollback(counts)
            lists = [held[: len(held) - count] for held, count in zip(lists, counts, strict=True)]
            following = [place - count for place, count in zip(following, counts, strict=True)]
        elif move == "reorder":
            cache.reorder(argument)
            lists, following, fixed = ([column[row] for row in argument] for column in (lists, following, fixed))
            lists = [list(held) for held in lists]
        else:
            slots = [sorted({slot for slot in row if slot < len(held)}) for row, held in zip(argument, lists, strict=True)]
            cache.retain(slots)
            lists = [[held[slot] for slot in row] for row, held in zip(slots, lists, strict=True)]
            fixed = [len(held) for held in lists]
    for layer in (0, 1) if format is None else (0,):
        assert texts(cache, layer) == [[token for token, _ in held] for held in lists]
    assert cache.positions_next == following
    for row, held in enumerate(lists):
        assert cache.positions[row, : len(held)].tolist() == [position for _, position in held]


@pytest.mark.parametrize(("format", "bytes_"), [(None, 2 * 4), ("fp8_e4m3", 4), ("int8", 4 + 2)])
def test_the_size_is_that_of_the_tensors(format, bytes_):
    cache = Cache(SHAPE, rows=3, capacity=5, dtype=torch.bfloat16, format=format)
    assert cache.size_bytes == 2 * 2 * 3 * 2 * 5 * bytes_  # keys and values, layers, rows, heads, tokens
    held = [cache.keys, cache.values, cache.key_scales, cache.value_scales]
    assert cache.size_bytes == sum(tensor.nbytes for tensor in held if tensor is not None)


def test_some_rows_can_be_read_alone():
    for format in (None, "int8", "fp8_e4m3"):
        cache = Cache(SHAPE, rows=3, capacity=6, format=format)
        give(cache, [[1, 2], [4], [8, 16, 32]])
        keys, values = cache.read(0, 2, torch.tensor([2, 0]))
        assert keys[:, 0, :, 0].round().tolist() == [[8, 16], [1, 2]]
        assert torch.equal(values, -keys)
        assert keys.dtype == torch.float32


def test_what_cannot_be_is_refused_and_changes_nothing():
    cache = Cache(SHAPE, rows=2, capacity=4)
    give(cache, [[1, 2], [3]])
    before = texts(cache)
    for message, call in {
        "row 0 holds 2 tokens and is to read 3 more, but its cache has room for 4": lambda: cache.append([[1, 1, 1], [5]], keep=[0, 0]),
        "row 1 reads 1 tokens and wants the logits of 2": lambda: cache.append([[1], [5]], keep=[0, 2]),
        "cannot take 2 tokens back from row 1, which holds 1": lambda: cache.rollback([1, 2]),
        "1 counts for a cache of 2 rows": lambda: cache.rollback([1]),
        "-1 tokens": lambda: cache.rollback([-1, 0]),
        r"sources=\[0, 2\]": lambda: cache.reorder([0, 2]),
        r"the slots \[0, 2\]": lambda: cache.retain([[0], [0, 2]]),
        r"the slots \[1, 0\]": lambda: cache.retain([[1, 0], [0]]),
    }.items():
        with pytest.raises(ValueError, match=message):
            call()
    assert texts(cache) == before == [[1, 2], [3]]
    for wrong, message in (({"rows": 0}, "0 rows"), ({"capacity": 0}, "0 tokens"), ({"format": "int2"}, "'int2'.*fp8_e4m3, int8")):
        with pytest.raises(ValueError, match=message):
            Cache(SHAPE, **{"rows": 1, "capacity": 1, **wrong})
