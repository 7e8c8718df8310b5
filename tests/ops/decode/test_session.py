"""A model and its cache: what is read, taken back, and let go."""

import pytest
import torch

from assay.ops.decode.session import Session


@pytest.mark.parametrize("kv_format", [None, "int8"])
def test_rows_taken_back_are_as_if_never_read(tl8, kv_format):
    straight = Session(tl8, kv_format=kv_format)
    straight.read([5, 17, 90], keep=1)
    detour = Session(tl8, kv_format=kv_format, rollback=True)
    detour.read([5, 17, 90, 60, 61, 62], keep=1)
    detour.rollback(3)
    assert detour.length == straight.length == 3
    assert detour.cache.get_seq_length() == 3
    assert torch.allclose(detour.read([7], keep=1), straight.read([7], keep=1), atol=1e-4)


def test_a_sliding_window_keeps_what_left_it_only_until_the_next_rollback(make_mistral):
    session = Session(make_mistral(window=6), rollback=True)
    for _ in range(8):
        session.read([3, 4, 5, 6, 7], keep=1)
        session.rollback(0)
        assert session.cache.layers[0].keys.shape[-2] == min(5, session.length)  # the window holds the next token as well
    assert session.length == 40


def test_more_rows_than_there_are_cannot_be_taken_back(tl8):
    session = Session(tl8, rollback=True)
    session.read([5, 6], keep=1)
    with pytest.raises(ValueError, match="cannot take 3 rows back from a cache of 2"):
        session.rollback(3)
    with pytest.raises(ValueError, match="-1"):
        session.rollback(-1)


def test_only_the_positions_asked_for_get_logits(tl8):
    assert Session(tl8).read([5, 6, 7, 8], keep=2).shape == (2, 128)


def test_no_deprecated_argument_is_passed(tl8, recwarn, caplog):
    Session(tl8).read([5, 6], keep=1)
    assert not [warning for warning in recwarn if "past_key_values" in str(warning.message)]
    assert "past_key_values" not in caplog.text
