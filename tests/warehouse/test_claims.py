"""The claims: their files, their arithmetic beside the closed forms of ``ops``, and verdicts that were worked by hand from made-up facts."""

import json
import re
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from typing import Any, NamedTuple

import duckdb
import pytest
from hypothesis import given
from hypothesis import strategies as some

from assay.schemas.facts import DeviceRow, ExperimentRow, LineageRow, Measurement, ProtocolRow, StepRow, VariantRow
from assay.schemas.metrics import METRICS, TIMED_SUITES, suite_of
from assay.warehouse.claims import claims, parse
from assay.warehouse.database import connect, snapshot
from assay.warehouse.facts import FactStore
from assay.warehouse.reads import claims as read_claims

IDS = [f"{part}{number:02d}" for part, last in zip("sdqaekpc", (13, 14, 19, 2, 9, 6, 20, 2), strict=True) for number in range(1, last + 1)]
EXACT = ["s01", "s02", "s03", "s07", "s09", "d01", "d02", "d10", "q01", "q02", "q03", "q04", "q05", "q11", "q17", "q18", "a01", "e07", "k01", "k02", "p09", "p13", "c02"]  # fmt: skip
NOON = datetime(2026, 11, 1, 12, tzinfo=UTC)
VERDICTS = {"supported", "refuted", "undecided", "not measured", "not comparable"}


def test_every_statement_of_the_list_is_a_file_and_no_other():
    assert len(IDS) == 85 and sorted(claim.id for claim in claims()) == sorted(IDS)


def test_the_arithmetic_ones_are_all_computed_and_more_than_45_are_measured():
    assert sorted(claim.id for claim in claims() if claim.kind == "exact") == sorted(EXACT)
    measured = [claim for claim in claims() if claim.kind == "measured"]
    assert len(measured) >= 45 and not [claim.id for claim in measured if "WHERE false" in claim.query]


@pytest.mark.parametrize("claim", claims(), ids=lambda claim: claim.id)
def test_a_claim_says_what_it_is(claim):
    assert claim.statement.endswith(".") and claim.source and claim.metric and not claim.metric.endswith(".")
    assert (claim.upto is not None) == (claim.direction == "between")
    named = set(re.findall(r"metric (?:=|IN) \(?((?:'\w+'(?:, )?)+)", claim.query))
    known = {metric for metrics in METRICS.values() for metric in metrics}
    assert {name for each in named for name in re.findall(r"'(\w+)'", each)} <= known


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("-- kind: exact", "-- kind: certain"), "kind is 'certain'; expected one of exact, measured"),
        (("-- kind: exact", "-- kinds: exact"), "got the line '-- kinds: exact'"),
        (("-- threshold: 5", "-- threshold: 5 6"), "threshold takes one number"),
        (("-- direction: at_most\n", ""), "its header has no direction"),
        (("-- source: s", "-- source: s\n-- source: t"), "each key once"),
    ],
)
def test_a_header_that_is_wrong_is_told_with_its_file(change, message):
    keys = {"id": "x", "statement": "It is.", "published": "5", "source": "s", "kind": "exact", "metric": "m", "direction": "at_most", "threshold": "5", "experiment": "arithmetic"}  # fmt: skip
    text = "\n".join(f"-- {key}: {value}" for key, value in keys.items()) + "\nSELECT 1 AS value;\n"
    assert parse(text, "x.sql").query == "SELECT 1 AS value"
    with pytest.raises(ValueError, match=r"claims/x\.sql") as error:
        parse(text.replace(*change), "x.sql")
    assert message in str(error.value)


@pytest.fixture(scope="module")
def empty(tmp_path_factory):
    with connect(tmp_path_factory.mktemp("empty")) as connection:
        yield connection


def test_without_facts_arithmetic_alone_has_a_verdict_and_the_rest_names_its_experiment(empty):
    rows = empty.sql("SELECT id, verdict, experiment, value FROM claims").fetchall()
    assert sorted(id for id, *_ in rows) == sorted(IDS)
    assert {id for id, verdict, *_ in rows if verdict != "not measured"} == set(EXACT)
    assert all(experiment and (value is None) == (verdict == "not measured") for _, verdict, experiment, value in rows)


@pytest.mark.parametrize("claim", claims(), ids=lambda claim: claim.id)
def test_a_query_stands_alone_and_gives_only_the_columns_of_an_answer(empty, claim):
    found = empty.sql(claim.query)
    assert set(found.columns) <= {"experiment", "base", "value", "error", "n", "reason", "detail"} and "value" in found.columns
    assert len(found.fetchall()) == (claim.id in EXACT)


def arithmetic() -> dict[str, tuple[float, str]]:
    """What each exact claim comes to by the closed forms of ``ops``, and its verdict."""
    from assay.ops.cost.kv import CONTEXT_128K, crossover_context, kv_bytes_at, mla_bytes_per_token, shared_bits
    from assay.ops.cost.rounding import flattened, gaussian_codebook_mse, rounding_deviation, step_of, variance_factor
    from assay.ops.cost.sampling import frequency_penalty, tail_mass
    from assay.ops.cost.training import teacher_share
    from assay.ops.decode.acceptance import expected_speedup, expected_tokens
    from assay.ops.evaluate.pass_at_k import pass_at_k
    from assay.ops.quantize.elements import nf4_values
    from assay.ops.quantize.ranges import gaussian_clip
    from assay.ops.quantize.semi_structured import share_of_dense

    gib = 2**30

    def right(*pairs: tuple[float, float, float]) -> int:
        return sum(abs(ours - published) <= rounding for ours, published, rounding in pairs)

    kv = [kv_bytes_at(layers, 8, 128) for layers in (80, 32)]
    cache = [each * CONTEXT_128K / gib for each in kv]
    kivi = float(16 / shared_bits(4, group=32))
    nf4 = 1 - gaussian_codebook_mse(nf4_values(), block=64) / gaussian_codebook_mse([code / 7.5 for code in range(-8, 8)], block=64)
    return {
        "s03": (right((tail_mass(10**5, 1e-6), 0.1, 0.05), (tail_mass(10**5, 2e-6), 0.2, 0.05)), "supported"),
        "s07": (pass_at_k(10, 2, 5), "supported"),
        "s09": (frequency_penalty(0.1, 50), "supported"),
        "d02": (right((expected_tokens(0.7, 3), 2.53, 0.005), *((expected_speedup(*given), published, 0.05) for given, published in (((0.8, 4, 0.1), 2.4), ((0.7, 3, 0.05), 2.2), ((0.7, 3, 0.11), 1.9)))), "supported"),
        "d10": (3, "supported"),
        "q01": (variance_factor(8, 7), "supported"),
        "q02": (right((step_of(15, 4), 2, 0.5), (step_of(10, 4), 1.33, 0.005), (step_of(10, 8), 0.08, 0.005), (rounding_deviation(step_of(10, 4)), 0.38, 0.005), (rounding_deviation(2), 0.58, 0.005)), "supported"),
        "q03": (8, "supported"),
        "q04": (gaussian_clip(4), "supported"),
        "q11": (right((flattened(500, 1024).typical, 17, 0.5), (flattened(1000, 4096).typical, 17, 0.5)), "supported"),
        "q17": (3, "supported"),
        "q18": (nf4, "refuted"),
        "k01": (right((kv[0] / 1024, 320, 0.5), (kv[1] / 1024, 128, 0.5), (cache[0], 40, 0.5), (cache[1], 16, 0.5), (cache[0] / 2, 20, 0.5), (cache[1] / 2, 8, 0.5), (kivi, 3.2, 0.05), (cache[0] / kivi, 12.5, 0.05), (cache[1] / kivi, 5, 0.5), (cache[0] / kivi / 4, 3.1, 0.05), (mla_bytes_per_token(61, 512, 64) * CONTEXT_128K / gib, 8.8, 0.05)), "refuted"),
        "k02": (crossover_context(2 * 70_553_706_496, kv[0]), "refuted"),
        "p09": (float(Fraction(share_of_dense(16))), "refuted"),
        "p13": (right((teacher_share(15, 8), 0.6, 0.05), (1 + teacher_share(15, 8), 1.6, 0.05), (teacher_share(70, 8), 2.9, 0.05)), "supported"),
        "c02": (2, "supported"),
    }  # fmt: skip


def test_arithmetic_in_sql_equals_the_closed_forms_and_refuted_figures_stay_refuted(empty):
    """s01, s02, d01, q05, a01 and e07 are identities: their value is a deviation, of 0."""
    found = {id: told for id, *told in empty.sql("SELECT id, value, verdict FROM claims WHERE kind = 'exact'").fetchall()}
    worked = arithmetic()
    for id, (value, verdict) in worked.items():
        assert found[id] == [pytest.approx(value, rel=0.02 if id in ("q04", "q18") else 1e-9), verdict], id
    for id in set(EXACT) - set(worked):
        assert found[id] == [pytest.approx(0, abs=1e-6), "supported"], id


def verdict(connection, claim: Any, value: float, error: float | None, reason: str | None = None) -> str:
    """What the view makes of one answer to ``claim``."""
    given = f"{value!r}::DOUBLE AS value, {'NULL' if error is None else repr(error)}::DOUBLE AS error, {'NULL' if reason is None else repr(reason)}::VARCHAR AS reason"
    connection.execute(f"CREATE OR REPLACE MACRO claim_answers() AS TABLE (SELECT '{claim.id}' AS id, 'e' AS experiment, 'b' AS base, {given}, 1::BIGINT AS n, ''::VARCHAR AS detail)")  # fmt: skip
    ((found,),) = connection.sql(f"SELECT verdict FROM claims WHERE id = '{claim.id}'").fetchall()
    return found


OF = {claim.direction: claim for claim in claims()}


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    connection = connect(tmp_path_factory.mktemp("judge"))
    yield lambda *given: verdict(connection, *given)
    connection.close()


@given(direction=some.sampled_from(sorted(OF)), offset=some.integers(-40, 40), error=some.sampled_from([0.0, 0.25, 1.0, 4.0]))
def test_a_verdict_is_where_the_interval_lies(judge, direction, offset, error):
    claim = OF[direction]
    value = claim.threshold + offset / 4
    low, high, upto = value - 1.96 * error, value + 1.96 * error, claim.upto or 0.0
    holds = {"above": low > claim.threshold, "at_least": low >= claim.threshold, "below": high < claim.threshold, "at_most": high <= claim.threshold, "between": low >= claim.threshold and high <= upto}  # fmt: skip
    fails = {"above": high <= claim.threshold, "at_least": high < claim.threshold, "below": low >= claim.threshold, "at_most": low > claim.threshold, "between": high < claim.threshold or low > upto}  # fmt: skip
    assert judge(claim, value, error) == ("supported" if holds[direction] else "refuted" if fails[direction] else "undecided")


def test_without_a_known_error_nothing_is_decided_and_a_reason_comes_before_the_number(judge):
    claim = OF["above"]
    assert judge(claim, claim.threshold + 100, None) == "undecided"
    assert judge(claim, claim.threshold + 100, 0.0, "a timing was noisy") == "not comparable"


class Fact(NamedTuple):
    """One number of a made-up study."""

    variant: str
    metric: str
    value: float | None
    error: float | None = 0.0
    slice: str = "all/all"  # kind, then part
    protocol: str = ""
    n: int = 100
    status: str = "ok"


STEP = {
    "int8": {"kind": "quantize", "method": "rtn", "format": "int8", "group_size": 64, "symmetric": True, "range": "minmax", "inputs": None, "gptq": None},
    "prune": {"kind": "prune_depth", "layers": 7, "score": "block_influence"},
    **{f"without{at}": {"kind": "prune_depth", "layers": 1, "score": "listed", "listed": [at]} for at in (0, 14, 27)},
    "ngram": {"kind": "draft", "method": "ngram", "tokens": 4},
    "draft": {"kind": "draft", "method": "variant", "tokens": 4},
    "kv8": {"kind": "kv", "format": "fp8_e4m3"},
    "kl": {"kind": "distill", "loss": "forward_kl", "tokens": 1000},
    "half": {"kind": "prune_weights", "method": "wanda", "sparsity_pct": 50, "pattern": None},
}  # fmt: skip
STEP |= {
    "int4": STEP["int8"] | {"format": "int4"}, "int3": STEP["int8"] | {"format": "int3"}, "w8a8": STEP["int8"] | {"inputs": {"format": "int8"}},
    "fp8": STEP["int8"] | {"format": "fp8_e4m3"}, "gptq": STEP["int8"] | {"format": "int4", "method": "gptq", "gptq": {"act_order": "static"}},
    "run": STEP["prune"] | {"score": "angular"}, "text": STEP["kl"] | {"loss": "cross_entropy"}, "half_gpt": STEP["half"] | {"method": "sparsegpt"},
}  # fmt: skip


def study(store: FactStore, name: str, variants: dict[str, list[str]], facts: list[Fact], protocols: dict[str, dict] | None = None) -> None:
    """Write an experiment ``name``: a base of 28 layers and ``variants`` of the steps named, with ``facts``; ``protocols`` are suites' own by default."""
    made = {"base": [], **variants}
    spec = json.dumps({"base": {"shape": {"layers": 28}}})
    row = ExperimentRow(experiment=name, question="?", axes=[], variants=list(made), spec_json=spec, declared_at=NOON)
    store.append("experiment", [row], name=name)
    store.append("variant", [
        VariantRow(experiment=name, variant=variant, base="tiny", artifact_digest=f"{name}/{variant}", target_digest=f"{name}/{variant}",
                   checkpoint_digest=f"{name}/{variant}", spec_json=json.dumps([STEP[step] for step in steps]), recorded_at=NOON)
        for variant, steps in made.items()
    ], name=name)  # fmt: skip
    asked = {suite: {"suite": suite} for suite in METRICS} | (protocols or {})
    store.append("protocol", [ProtocolRow(protocol_digest=f"{name}/{key}", name=key, suite=told["suite"], spec_json=json.dumps(told)) for key, told in asked.items()], name=name)  # fmt: skip
    rows = []
    for at, fact in enumerate(facts):
        suite = suite_of(fact.metric)
        assert suite is not None
        kind, part = fact.slice.split("/", 1)
        rows.append({
            "metric": fact.metric, "value": fact.value, "artifact_digest": f"{name}/{fact.variant}", "base_digest": f"{name}/base",
            "protocol_digest": f"{name}/{fact.protocol or suite}", "suite": suite, "slice_kind": kind, "slice": part, "standard_error": fact.error,
            "unit": "1", "n": fact.n, "status": fact.status, "device_digest": "cpu0" if suite in TIMED_SUITES else None,
            "threads": 2 if suite in TIMED_SUITES else None, "run": f"r{at}", "measured_at": NOON + timedelta(seconds=at),
        })  # fmt: skip
    store.append("measurement", [Measurement(**row) for row in rows], name=name)


GREEDY, WARM = {"suite": "acceptance", "sampling": {"temperature": 0.0}}, {"suite": "acceptance", "sampling": {"temperature": 1.0}}
PASSAGE, COPY = {"suite": "speculation", "prompt": "passage"}, {"suite": "speculation", "prompt": "copy"}


def layers(variant: str, *snr: float) -> list[Fact]:
    return [Fact(variant, "snr_db", value, slice=f"layer/model.layers.{at}.mlp.up_proj") for at, value in enumerate(snr)]


def languages(variant: str, error: float = 0.0, **kl: float) -> list[Fact]:
    return [Fact(variant, "kl_mean_nats", value, error, slice=f"language/{name}") for name, value in kl.items()]


def scores(variant: str, choice: float, answers: float, needles: float, error: float = 0.01) -> list[Fact]:
    named = {"accuracy": choice, "task_score": answers, "needle_accuracy": needles}
    return [Fact(variant, name, value, error) for name, value in named.items()]


# id, experiment: variants, facts, protocols, and what comes out: value and verdict. All worked by hand.
CASES: dict[tuple[str, str], tuple[dict[str, list[str]], list[Fact], dict[str, dict], float, str]] = {
    # rounding: a ratio of means of two variants
    ("q06", "halved"): ({"r": ["int4"], "g": ["gptq"]}, [Fact("r", "kl_mean_nats", 0.5, 0.01), Fact("g", "kl_mean_nats", 0.1, 0.01)], {}, 0.2, "supported"),
    ("q06", "no_better"): ({"r": ["int4"], "g": ["gptq"]}, [Fact("r", "kl_mean_nats", 0.5, 0.01), Fact("g", "kl_mean_nats", 0.4, 0.01)], {}, 0.8, "refuted"),
    ("q06", "unclear"): ({"r": ["int4"], "g": ["gptq"]}, [Fact("r", "kl_mean_nats", 0.5, 0.1), Fact("g", "kl_mean_nats", 0.2, 0.1)], {}, 0.4, "undecided"),
    ("q10", "both"): ({"a": ["w8a8"], "f": ["fp8"]}, [Fact("a", "kl_mean_nats", 0.002, 0.0001), Fact("f", "kl_mean_nats", 0.02, 0.001)], {}, 0.02, "refuted"),
    # 6.02 dB a bit is a factor of 4: 24.08 dB of 4 bits is 4 a bit, 12 dB is 2 a bit
    ("q01", "four"): ({"eight": ["int8"], "four": ["int4"]}, [*layers("eight", 44.0824, 40.0824), *layers("four", 20, 16)], {}, 4.0, "supported"),
    ("q01", "two"): ({"eight": ["int8"], "four": ["int4"]}, [*layers("eight", 32.0412, 30.0412), *layers("four", 20, 18)], {}, 2.0, "refuted"),
    ("e01", "near"): ({"r": ["int4"], "g": ["gptq"]}, [Fact("r", "kl_mean_nats", 0.2, 0.01), Fact("g", "kl_mean_nats", 0.03, 0.001)], {}, 0.03, "supported"),
    ("e01", "far"): ({"r": ["int4"]}, [Fact("r", "kl_mean_nats", 0.3, 0.01)], {}, 0.3, "refuted"),
    ("k03", "order"): ({"k": ["kv8"]}, [Fact("k", "kl_mean_nats", 0.001, 0.0001)], {}, 0.001, "supported"),
    # splits
    ("e05", "twice"): ({"r": ["int4"]}, [*languages("r", 0.01, en=0.2, de=0.5, zh=0.5)], {}, 2.5, "supported"),
    ("e05", "same"): ({"r": ["int4"]}, [*languages("r", 0.01, en=0.2, de=0.1, zh=0.3)], {}, 1.0, "refuted"),
    ("e07", "broken"): ({"r": ["int4"]}, [Fact("r", "kl_mean_nats", 0.02), Fact("r", "tv_mean", 0.2)], {}, 0.1, "refuted"),
    ("k05", "sinks"): ({}, [Fact("base", "sink", value, slice=f"head/0.{at}") for at, value in enumerate([0.4] * 9)], {}, 0.4, "supported"),
    ("s06", "opposite"): ({}, [Fact("base", "pass_at_1", value, 0.01, f"temperature/{at}") for at, value in (("0", 0.6), ("0.3", 0.5), ("0.7", 0.4))]
        + [Fact("base", "pass_at_k", value, 0.01, f"temperature_k/{at}") for at, value in (("0.3/8", 0.6), ("0.7/8", 0.8), ("0.7/4", 0.1))], {}, 0.1, "supported"),
    ("s06", "both_fall"): ({}, [Fact("base", "pass_at_1", value, 0.01, f"temperature/{at}") for at, value in (("0.3", 0.5), ("0.7", 0.4))]
        + [Fact("base", "pass_at_k", value, 0.01, f"temperature_k/{at}") for at, value in (("0.3/8", 0.8), ("0.7/8", 0.6))], {}, -0.2, "refuted"),
    ("s08", "votes"): ({}, [Fact("base", "pass_at_1", 0.3, 0.01, "temperature/0.7"), Fact("base", "majority_at_k", 0.5, 0.01, "temperature_k/0.7/8")], {}, 0.2, "supported"),
    # of 8 runs: 1.96 · 0.04, with an error of that over √14
    ("e06", "apart"): ({}, [Fact("base", "task_sample_spread", 0.04, None, "task/asdiv", n=8)], {}, 0.0784, "supported"),
    ("e06", "near"): ({}, [Fact("base", "task_sample_spread", 0.02, None, "task/asdiv", n=8)], {}, 0.0392, "undecided"),
    # two protocols of one variant
    ("d05", "falls"): ({"d": ["draft"]}, [Fact("d", "acceptance_when_reached", 0.8, 0.01, protocol="cold"), Fact("d", "acceptance_when_reached", 0.5, 0.01, protocol="warm")],
        {"cold": GREEDY, "warm": WARM}, 0.3, "supported"),
    ("d08", "copies"): ({"n": ["ngram"]}, [Fact("n", "measured_speedup", 3.0, 0.1, protocol="copy"), Fact("n", "measured_speedup", 1.0, 0.05, protocol="free")],
        {"copy": COPY, "free": PASSAGE}, 3.0, "supported"),
    ("d08", "busy"): ({"n": ["ngram"]}, [Fact("n", "measured_speedup", 3.0, 0.1, protocol="copy", status="noisy"), Fact("n", "measured_speedup", 1.0, 0.05, protocol="free")],
        {"copy": COPY, "free": PASSAGE}, 3.0, "not comparable"),
    ("d03", "same_words"): ({"n": ["ngram"]}, [Fact("n", "greedy_mismatches", 0.0, None)], {}, 0.0, "supported"),
    ("d03", "other_words"): ({"n": ["ngram"]}, [Fact("n", "greedy_mismatches", 2.0, None)], {}, 2.0, "refuted"),
    ("d04", "positions"): ({"d": ["draft"]}, [Fact("d", "acceptance_rate", value, 0.01, f"position/{at}") for at, value in ((1, 0.8), (2, 0.7), (5, 0.5), (6, 0.1))], {}, 0.3, "supported"),
    # timings: ln(1.25 · 2 / (1.25 · 2.5)) of the parts
    ("d12", "less"): ({"q": ["int4"], "d": ["ngram"], "both": ["int4", "ngram"]},
        [Fact(variant, "decode_tok_s", value, 0.1) for variant, value in (("base", 20.0), ("q", 25.0), ("d", 40.0), ("both", 40.0))], {}, -0.2231, "supported"),
    ("p08", "none"): ({"h": ["half"]}, [Fact("base", "decode_tok_s", 20.0, 0.1), Fact("h", "decode_tok_s", 20.0, 0.1)], {}, 1.0, "supported"),
    ("q14", "both_ways"): ({"q": ["int4"]}, [Fact("base", "decode_tok_s", 20.0, 0.1), Fact("q", "decode_tok_s", 40.0, 0.1), Fact("base", "prefill_tok_s", 400.0, 1), Fact("q", "prefill_tok_s", 200.0, 1)], {}, 0.6931, "supported"),
    # tasks: losses of 10 % in choice, 30 % in answers, 50 % in needles
    ("e08", "choice_least"): ({"q": ["int4"]}, [*scores("base", 0.5, 0.5, 0.6), *scores("q", 0.45, 0.35, 0.3)], {}, 0.2, "supported"),
    ("e03", "steps_first"): ({"q": ["int4"]}, [*scores("base", 0.5, 0.5, 0.6), *scores("q", 0.45, 0.35, 0.3)], {}, 0.3, "supported"),
    ("e03", "floor"): ({"q": ["int4"]}, [*scores("base", 0.5, 0.5, 0.04), *scores("q", 0.45, 0.35, 0.02)], {}, 0.3, "not comparable"),
    ("e02", "hidden"): ({"q": ["int4"]}, [*scores("base", 0.5, 0.5, 0.6), *scores("q", 0.45, 0.35, 0.3), Fact("base", "perplexity", 10.0, 0.05), Fact("q", "perplexity", 10.5, 0.05)], {}, 0.35, "supported"),
    # pruning: 7 of 28 layers
    ("p02", "large"): ({"p": ["prune"]}, [Fact("p", "perplexity_delta", 0.5, 0.05)], {}, 0.5, "supported"),
    ("p02", "small"): ({"p": ["prune"]}, [Fact("p", "perplexity_delta", 50.0, 0.5)], {}, 50.0, "refuted"),
    # the 28 blocks' second half but the last: 13 of them
    ("p01", "little"): ({}, [Fact("base", "block_cosine", 0.4 if at == 0 else 0.9, None, f"layer/model.layers.{at}") for at in range(28)], {}, 0.9, "supported"),
    ("p01", "less"): ({}, [Fact("base", "block_cosine", 0.99 if 13 < at < 27 else 0.9, None, f"layer/model.layers.{at}") for at in range(28)], {}, 0.99, "refuted"),
    ("p05", "ends"): ({"a": ["without0"], "m": ["without14"], "z": ["without27"]},
        [Fact(variant, "kl_mean_nats", value, 0.01) for variant, value in (("a", 6.0), ("m", 0.2), ("z", 2.0))], {}, 10.0, "supported"),
    ("p05", "harmless"): ({"a": ["without0"], "m": ["without14"], "z": ["without27"]},
        [Fact(variant, "kl_mean_nats", value, 0.001) for variant, value in (("a", 6.0), ("m", 0.2), ("z", 0.2))], {}, 1.0, "refuted"),
    ("p04", "run"): ({"p": ["prune"], "r": ["run"]}, [Fact(variant, name, value, 0.01) for variant, name, value in (("p", "kl_mean_nats", 1.0), ("p", "kl_p99_nats", 5.0), ("r", "kl_mean_nats", 2.0), ("r", "kl_p99_nats", 5.0))], {}, 0.5, "supported"),
    ("p06", "equal"): ({"w": ["half"], "s": ["half_gpt"]}, [Fact("w", "kl_mean_nats", 0.505, 0.001), Fact("s", "kl_mean_nats", 0.5, 0.001)], {}, 1.01, "supported"),
    ("p11", "taught"): ({"k": ["prune", "kl"], "t": ["prune", "text"]}, [Fact("k", "perplexity", 20.0, 0.1), Fact("t", "perplexity", 25.0, 0.1)], {}, 0.8, "supported"),
    ("p12", "most"): ({"k": ["prune", "kl"], "l": ["run", "kl"]}, [Fact("k", "regained_share", 0.7, None), Fact("l", "regained_share", 0.8, None)], {}, 0.75, "supported"),
    # ln(24 / 16) over ln(12.6491 / 10): pruned, rounding takes 16 to 24, whole 10 to 12.6491
    ("p15", "more"): ({"p": ["prune"], "q": ["int4"], "both": ["prune", "int4"]},
        [Fact(variant, "perplexity", value, 0.01) for variant, value in (("base", 10.0), ("p", 16.0), ("q", 12.6491), ("both", 24.0))], {}, 1.7254, "supported"),
}  # fmt: skip


AWQ = [("q09_inside", "inputs", (0.3, 0.55, 0.7, 0.85)), ("q09_outside", "inputs", (None, 0.0, 0.5, 0.75)), ("q09_control", "weights", (0.5,) * 4)]  # fmt: skip


def made(store: FactStore, kind: str, spec: dict, summary: dict, *, parent: str) -> str:
    """The digest of an artifact that a step made of ``parent``."""
    digest = json.dumps([kind, spec, parent])
    row = {"artifact_digest": digest, "key": digest, "kind": kind, "spec_json": json.dumps(spec), "summary_json": json.dumps(summary)}
    store.append("step", [StepRow(**row, code_fingerprint="c", size_bytes=1, build_seconds=1, built_at=NOON)])
    store.append("lineage", [LineageRow(artifact_digest=digest, parent_digest=parent, role="parent")])
    return digest


@pytest.fixture(scope="module")
def worked(tmp_path_factory):
    """All cases as experiments of one warehouse."""
    store = FactStore(tmp_path_factory.mktemp("worked") / "facts")
    store.append("device", [DeviceRow(device_digest="cpu0", kind="cpu", name="Some CPU", cores=2, memory_bytes=2**33, torch_version="0")])
    for (id, name), (variants, facts, protocols, _, _) in CASES.items():
        study(store, f"{id}_{name}", variants, facts, protocols)
    for name, value, starts in (("d07_taught", 0.6, ("same", "same")), ("d07_larger", 0.9, ("one", "other"))):  # what drafts began as
        accepted = [Fact("taught", "acceptance_when_reached", value, 0.01), Fact("read", "acceptance_when_reached", 0.4, 0.01)]
        study(store, name, {"taught": ["draft"], "read": ["draft"]}, accepted)
        for variant, loss, start in zip(("taught", "read"), ("forward_kl", "cross_entropy"), starts, strict=True):
            trained = made(store, "distill", {"loss": loss, "tokens": 1000}, {}, parent=f"{name}/{start}")
            store.append("lineage", [LineageRow(artifact_digest=f"{name}/{variant}", parent_digest=trained, role="draft")])
    for name, salience, alphas in AWQ:  # two variants of one search: it counts once
        study(store, name, {"a": ["int4"], "b": ["gptq"]}, [])
        pairs = {f"model.layers.{at}.o": {"alpha": alpha} for at, alpha in enumerate(alphas)}
        scaled = made(store, "smooth", {"method": "awq", "salience": salience}, {"pairs": pairs}, parent=f"{name}/base")
        store.append("lineage", [LineageRow(artifact_digest=f"{name}/{variant}", parent_digest=scaled, role="parent") for variant in "ab"])
    with connect(store.root) as connection:
        yield {(row["id"], row["experiment"]): row for row in read_claims(connection).to_dicts()}


@pytest.mark.parametrize(("id", "name"), CASES, ids=lambda part: part)
def test_a_verdict_worked_by_hand(worked, id, name):
    *_, value, verdict = CASES[id, name]
    row = worked[id, f"{id}_{name}"]
    assert (row["value"], row["verdict"], row["base"]) == (pytest.approx(value, rel=1e-3), verdict, "tiny")
    assert (row["reason"] is not None) == (verdict == "not comparable")


def test_a_taught_draft_is_found_by_what_it_was_made_from(worked):
    assert worked["d07", "d07_taught"]["value"] == pytest.approx(0.5) and worked["d07", "d07_taught"]["verdict"] == "supported"
    assert ("d07", "d07_larger") not in worked


def test_the_exponents_of_awq_are_read_from_what_its_step_said(worked):
    """Of ours, the error of a share of 4 is √(0.75 · 0.25 / 4)."""
    row = worked["q09", "q09_inside"]
    assert (row["value"], row["n"], row["verdict"]) == (0.75, 4, "undecided") and row["high"] - row["value"] == pytest.approx(
        1.96 * 0.2165, rel=1e-3
    )
    assert row["detail"] == "mean 0.60, standard deviation 0.23, from 0.30 to 0.85"
    assert worked["q09", "q09_outside"]["value"] == 0.25 and ("q09", "q09_control") not in worked


def test_a_claim_is_judged_in_every_experiment_that_has_facts_for_it(worked):
    assert {experiment for id, experiment in worked if id == "q06"} == {"q06_halved", "q06_no_better", "q06_unclear", "e01_near"}
    assert {experiment for id, experiment in worked if id == "p18"} == {"deep_or_wide"}  # not measured: where it would be


def test_the_claims_of_one_experiment_or_one_verdict(quickstart_warehouse):
    mine = read_claims(quickstart_warehouse, experiment="quickstart")
    assert set(mine["experiment"]) == {"quickstart"} and {"d12", "q14"} <= set(mine["id"])
    assert set(read_claims(quickstart_warehouse, verdict="refuted")["verdict"]) == {"refuted"}


def test_no_number_breaks_the_view(tmp_path):
    """Zeros, negatives, overflows and failures of every metric, under slices that no suite writes."""
    store = FactStore(tmp_path / "facts")
    store.append("device", [DeviceRow(device_digest="cpu0", kind="cpu", name="Some CPU", cores=2, memory_bytes=2**33, torch_version="0")])
    variants = {name: [name] for name in STEP} | {"taught": ["prune", "kl"], "read": ["prune", "text"], "drafted": ["int4", "ngram"], "both": ["prune", "int4"]}  # fmt: skip
    slices = ("all/all", "layer/x", "temperature/part 0", "temperature_k/0.7/8", "position/y", "language/en", "language/de", "batch/2")  # fmt: skip
    metrics = [metric for each in METRICS.values() for metric in each]
    places = [(variant, metric, each) for variant in ("base", *variants) for metric in metrics for each in slices]
    for name, value in {"zero": 0.0, "below": -1.0, "huge": 1e300, "none": None}.items():
        status = "ok" if value is not None else "failed"
        study(store, name, variants, [Fact(variant, metric, value, 0.0, each, status=status) for variant, metric, each in places])
    with connect(store.root) as connection:
        assert {verdict for (verdict,) in connection.sql("SELECT verdict FROM claims").fetchall()} <= VERDICTS


def test_the_published_file_has_the_same_claims(quickstart_facts, quickstart_warehouse, tmp_path, near):
    with duckdb.connect(str(snapshot(quickstart_facts, tmp_path / "w.duckdb")), read_only=True) as client:
        assert client.sql("FROM claims").fetchall() == near(quickstart_warehouse.sql("FROM claims").fetchall())
        assert {verdict for (verdict,) in client.sql("SELECT verdict FROM claims WHERE experiment = 'quickstart'").fetchall()} >= {"refuted", "undecided"}  # fmt: skip
