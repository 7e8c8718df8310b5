"""Predicted against measured, worked by hand on a device that reads 1,000 bytes and does 10,000 FLOPs a second."""

import json
import math

import pytest

from assay.schemas.facts import DeviceConstant, DeviceRow, ProtocolRow
from assay.warehouse.database import connect

SPEED = {"suite": "speed", "batch": 1, "prompt_tokens": 8, "prefill_tokens": 10, "new_tokens": 4, "repeats": 3, "dtype": "float32"}
BYTES = {"step_weight_bytes": 500.0, "block_parameters": 200.0, "head_parameters": 50.0, "attention_flops_per_context_token": 4.0, "kv_bytes_per_token": 10.0}  # fmt: skip


@pytest.fixture
def constant(noon):
    def make(constant="read_bandwidth", value=1000.0, **changes):
        unit = {"read_bandwidth": "B/s", "matmul_rate": "FLOP/s"}.get(constant, "s")
        return DeviceConstant(**{
            "device_digest": "cpu0", "constant": constant, "dtype": "float32", "size": f"{value}", "amount": 500.0, "value": value, "unit": unit,
            "spread": 0.0, "threads": 2, "measured_at": noon, **changes,
        })  # fmt: skip

    return make


@pytest.fixture
def timed(store, make_fact, make_variant, constant):
    """A variant with its bytes and timings; the arguments say what differs."""

    def add(
        variant="plain",
        *,
        steps=(),
        speed=SPEED,
        sizes=BYTES,
        kv_dtype="bfloat16",
        path="native avx512 float32, bfloat16 weights",
        rounds=None,
        **timings,
    ):
        store.append("device", [DeviceRow(device_digest="cpu0", kind="cpu", name="Some CPU", cores=2, memory_bytes=1, torch_version="2")])
        protocol = f"speed{speed['batch']}{speed['dtype']}"
        store.append("protocol", [
            ProtocolRow(protocol_digest=protocol, name=protocol, suite="speed", spec_json=json.dumps(speed)),
            ProtocolRow(protocol_digest=f"b{kv_dtype}", name="bytes", suite="bytes", spec_json=json.dumps({"suite": "bytes", "kv_dtype": kv_dtype})),
        ])  # fmt: skip
        store.append("variant", [make_variant(variant).model_copy(update={"spec_json": json.dumps(list(steps))})])
        of = {"artifact_digest": variant, "unit": "1"}
        rows = [make_fact(name, value, suite="bytes", protocol_digest=f"b{kv_dtype}", **of) for name, value in sizes.items()]
        rows += [make_fact("tokens_per_round", rounds, suite="acceptance", protocol_digest="acceptance", **of)] if rounds else []
        took = {"suite": "speed", "protocol_digest": protocol, "device_digest": "cpu0", "threads": 2, "path": path}
        rows += [make_fact(name, value, **took, **of) for name, value in timings.items()]
        store.append("measurement", rows)
        store.append("device_constant", [constant(), constant("matmul_rate", 10_000.0), constant("launch_overhead", 0.001)])

    return add


@pytest.fixture
def predicted(store):
    def read(columns):
        with connect(store.root) as connection:
            return connection.sql(f"SELECT {columns} FROM roofline ORDER BY variant, metric").fetchall()

    return read


def test_a_decode_step_worked_by_hand(timed, predicted):
    """500 B of weights and 10 tokens of 20 B (the engine's float32 cache, billed in bfloat16) are 0.7 s; 540 FLOPs are 0.054 s; measured: 1 s."""
    timed(decode_tok_s=1.0)
    ((seconds, measured, limit, residual, share, kv, flops),) = predicted(
        "predicted_seconds, measured_seconds, limit_by, log_residual, share_of_limit, kv_bytes, flops"
    )
    assert (seconds, measured, limit, share) == (pytest.approx(0.7), 1.0, "weights", pytest.approx(0.7))
    assert residual == pytest.approx(math.log(1 / 0.7)) and (kv, flops) == (200.0, 540.0)


def test_a_prefill_is_bound_by_arithmetic_and_its_head_runs_once(timed, predicted):
    """10 tokens · (400 + 4 · 5.5) + 100 are 4,320 FLOPs: 0.432 s; 500 + 200 B are 0.7 s. In a batch of 8: 3.456 s, and 2.1 s of memory."""
    timed(prefill_tok_s=10.0)
    timed("wide", speed={**SPEED, "batch": 8}, prefill_tok_s=16.0)
    assert predicted("variant, flops, predicted_seconds, measured_seconds, limit_by") == [
        ("plain", 4320.0, pytest.approx(0.7), 1.0, "weights"), ("wide", 34_560.0, pytest.approx(3.456), 5.0, "compute"),
    ]  # fmt: skip


def test_a_packed_cache_is_read_as_it_is_and_long_contexts_are_bound_by_it(timed, predicted):
    timed("kv8", steps=[{"kind": "kv", "format": "fp8_e4m3"}], speed={**SPEED, "prompt_tokens": 98}, decode_tok_s=1.0)
    assert predicted("kv_bytes, predicted_seconds, limit_by") == [(1000.0, pytest.approx(1.5), "kv")]


def test_weights_that_the_engine_multiplies_out_are_read_in_the_dtype_of_the_arithmetic(timed, predicted):
    timed(path="torch float32, int4 weights", decode_tok_s=1.0)
    assert predicted("weight_bytes") == [(1000.0,)]


def test_a_round_of_a_draft_is_a_verification_and_its_proposals(timed, predicted):
    """3 proposals of 100 B each, then 500 + 200 B for all four positions; 2.5 tokens a round at 2.5 tokens/s are a second."""
    steps = [{"kind": "quantize"}, {"kind": "draft", "method": "variant", "tokens": 3}]
    sizes = {**BYTES, "draft_step_weight_bytes": 100.0, "draft_matmul_parameters": 50.0}
    timed("drafted", steps=steps, sizes=sizes, rounds=2.5, decode_tok_s=2.5, decode_no_draft_tok_s=1.0)
    assert predicted("metric, tokens_per_forward, measured_seconds, draft_seconds, predicted_seconds, flops") == [
        ("decode_no_draft_tok_s", 1.0, 1.0, 0.0, pytest.approx(0.7), 540.0),
        ("decode_tok_s", 2.5, 1.0, pytest.approx(0.3), pytest.approx(1.0), 2160.0),
    ]


def test_constants_of_as_many_threads_and_of_the_nearest_size_are_used_and_noisy_ones_last(store, timed, predicted, constant):
    timed(decode_tok_s=1.0)
    store.append("device_constant", [
        constant(value=1e6, size="other threads", threads=1), constant(value=1e6, size="far", amount=5e6), constant(value=1e6, size="datasheet", source="datasheet"),
        constant(value=900.0, size="near", amount=600.0, status="noisy"),
    ])  # fmt: skip
    assert predicted("bandwidth_bytes_s, constants_status") == [(1000.0, "ok")]


def test_a_noisy_constant_is_told(store, timed, predicted, constant):
    timed(decode_tok_s=1.0)
    store.append("device_constant", [constant(value=10_000.0, constant="matmul_rate", status="noisy")])
    assert predicted("constants_status") == [("noisy",)]


def test_a_device_without_constants_predicts_nothing(store, timed, predicted):
    timed(decode_tok_s=1.0)
    for file in (store.root / "device_constant").rglob("*.parquet"):
        if file.parent.name != "schema":
            file.unlink()
    assert predicted("*") == []


def test_a_start_that_takes_longer_than_the_work_is_the_limit(store, timed, predicted, constant):
    timed(decode_tok_s=1.0)
    store.append("device_constant", [constant("launch_overhead", 2.0, size="0.001")])
    assert predicted("limit_by, predicted_seconds") == [("launch", 2.0)]
