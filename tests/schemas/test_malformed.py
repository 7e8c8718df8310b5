"""Experiments that cannot be: each is refused as a whole, before any work, with the place, what came, and what would work."""

import json
import re
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from assay.schemas.graph import build_graph
from assay.schemas.load import ExperimentError, load_experiment, parse_experiment
from assay.schemas.yaml import spell

HERE = Path(__file__).parent
GOOD = (HERE / "good.yaml").read_text(encoding="utf-8")


def spoilt() -> dict[str, tuple[list[tuple[str, str]], list[tuple[str, list[str]]]]]:
    """The cases of ``malformed/*.txt``: name → replacements in the good file, and (path, parts of the text) of every problem."""
    cases = {}
    for file in sorted((HERE / "malformed").glob("*.txt")):
        for paragraph in re.split(r"\n\n", file.read_text(encoding="utf-8").strip()):
            name, *lines = [line for line in paragraph.splitlines() if not line.startswith("#")] or [""]
            if name:
                assert name not in cases, name
                rows = [line.removeprefix("    ").replace("⏎", "\n") for line in lines]
                replaced = [tuple(row.split(" ⇒ ")) for row in rows if " ⇒ " in row]
                told = [row.split(": ", 1) for row in rows[len(replaced) :]]
                cases[name] = (replaced, [(path, parts.split(" … ")) for path, parts in told])
    return cases


CASES = spoilt()


@pytest.mark.parametrize("name", CASES)
def test_refused_with_path_and_remedy(name, good, parse):
    replaced, expected = CASES[name]
    for old, new in replaced:
        assert good.count(old) == 1, f"{old!r} is {good.count(old)} times in the good file"
        good = good.replace(old, new)
    with pytest.raises(ExperimentError) as caught:
        parse(good)
    told = str(caught.value).splitlines()
    assert len(told) == len(caught.value.problems) == len(expected)
    for line, (path, parts) in zip(told, expected, strict=True):
        assert re.match(r".*/experiment\.yaml:\d+: ", line)
        place, text = re.sub(r"^.*/experiment\.yaml:\d+: ", "", line).split(": ", 1)
        assert place == path
        assert all(part in text for part in parts), f"{text!r} does not say {parts}"


# Whole files: name → (text, the line that is told, what the text says).
BOMB = "a: &a [x, x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}]\n" for a, b in pairwise("abcdefghij"))
WHOLE: dict[str, tuple[str, int | None, tuple[str, ...]]] = {
    "an empty file": ("", None, ("is empty", "assay new")),
    "only a comment": ("# nothing\n", None, ("is empty", "assay new")),
    "a list": ("- name: x\n", 1, ("an experiment is a mapping", 'got [{"name": "x"}]')),
    "a word": ("quickstart\n", 1, ("an experiment is a mapping", 'got "quickstart"')),
    "null": ("null\n", 1, ("an experiment is a mapping", "got null")),
    "two documents": ("name: x\n---\nname: y\n", 2, ("another document", "one experiment a file")),
    "an anchor": ("name: &x good\n", 1, ("anchor &x is not allowed", "write it out")),
    "an alias of nothing": ("name: good\nbase: *x\n", 2, ("alias *x is not allowed", "write it out")),
    "a billion laughs": (BOMB, 1, ("anchor &a is not allowed",)),
    "a merge key": ("name: x\n<<: {base: tiny}\n", 2, ("merge key << is not allowed", "write the keys out")),
    "a tag that calls Python": ('name: !!python/object/apply:os.system ["true"]\n', 1, ("python/object/apply:os.system is not allowed", "write plain data")),
    "a tag of one's own": ("name: !secret good\n", 1, ("tag !secret is not allowed", "write plain data")),
    "bytes": ("name: !!binary aGk=\n", 1, ("binary is not allowed",)),
    "a tab for an indent": ("name: x\naxes:\n\tprune: {}\n", 3, ("is not YAML", "indent with spaces, not tabs")),
    "an open bracket": ("name: x\naxes: {prune: {none: []}\n", 3, ("is not YAML", "brackets")),
    "an open quote": ('name: x\nbase: "tiny\n', 3, ("is not YAML", "quotes")),
    "a wrong indent": ("name: x\naxes:\n    prune: {}\n  kv: {}\n", 4, ("is not YAML", "indentation")),
    "two colons": ("name: x: y\n", 1, ("is not YAML", "mapping values are not allowed here")),
    "a control character": ("name: x\nbase: \x07\n", 2, (r"'\x07' is not allowed", "plain text")),
    "half of a surrogate pair in a key": (GOOD + '"\\ud800": 1\n', 24, ("a key of it has half of a surrogate pair",)),
    "a key with our parser's word for a key": (GOOD + '"[key]": 1\n', 24, ("'[key]': is no key of this mapping",)),
    "a key with our parser's word for a branch": (GOOD + '"<other>": 1\n', 24, ("'<other>': is no key of this mapping",)),
    "a base with our parser's word for a branch": (GOOD.replace("base: tiny", 'base: {"<other>": 1}'), 3, ("base.'<other>': is no key",)),
    "half of a surrogate pair": ('name: "\\ud800"\n', 1, ("surrogate",)),
    "deeper than it can be": ("name: x\nbase: " + "[" * 100_000, 2, ("deeper than 40 levels",)),
    "larger than it can be": ("# " + "x" * 200_000, None, ("has 200,002 characters", "at most 200,000")),
    "a number of ten thousand digits": (GOOD.replace("seed: 7", "seed: " + "9" * 10_000), 22, ("too large",)),
    "a path of five thousand letters": (GOOD.replace("base: tiny", f"base: {{path: {'x' * 5000}}}"), 3, ("is no checkpoint",)),
    "a text of five thousand letters": (GOOD.replace("{windows: 8}", f"{{text: {{path: {'x' * 5000}.txt}}}}"), 8, ("there is no file",)),
    "a path with a null in it": (GOOD.replace("base: tiny", 'base: {path: "a\\0b"}'), 3, ("is no checkpoint",)),
    "a key of nine hundred letters": (GOOD.replace("seed: 7", f"{'k' * 900}: 7"), 22, ("k" * 59 + "…: is no key",)),
    "a key that writes on the terminal": (GOOD.replace("seed: 7", r'"\e[31m": 7'), 22, (r"'\x1b[31m': is no key",)),
    "a question of a book's length": (GOOD.replace("What does it cost?", "why " * 600), 2, ("expected text of at most 2,000 characters",)),
    "more steps than an option takes": (GOOD.replace("[{kind: kv, format: fp8_e4m3}]", f"[{'{kind: kv, format: int8}, ' * 17}]"), 14, ("17 of them", "0 to 16")),
    "names that make too long a slug": (
        GOOD.replace("  prune:\n", "".join(f"  {axis}: {{{axis * 48}: []}}\n" for axis in "vwxyz") + "  prune:\n"), 4, ("has a name of", "shorten", "200 together")
    ),
    "a product of a million variants": (
        "name: x\nbase: tiny\nmeasure: [bytes]\nmax_variants: 5000\naxes:\n" + "".join(
            f"  {axis}: {{none: [], {', '.join(f'{axis}{n}: [{{kind: prune_depth, layers: 1, calibration: {{windows: {n}}}}}]' for n in range(1, 10))}}}\n" for axis in "abcdef"
        ), 5, ("the grid has 1,000,000 variants (axes: 10 × 10 × 10 × 10 × 10 × 10)", "more than max_variants = 5,000", "include")
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_file_is_refused(name, parse):
    text, line, parts = WHOLE[name]
    started = time.monotonic()
    with pytest.raises(ExperimentError) as caught:
        parse(text)
    assert time.monotonic() - started < 10
    told = str(caught.value)
    assert (rf"experiment.yaml:{line}: " if line else "experiment.yaml: ") in told
    assert all(part in told for part in parts), told
    assert told.isprintable() or told.replace("\n", "").isprintable()
    assert len(caught.value.problems) == 1 or name in ("a merge key", "half of a surrogate pair")  # these are read on, and lack the rest


def test_a_file_that_is_not_text_is_refused_with_its_line(registries, tmp_path):
    file = tmp_path / "experiment.yaml"
    file.write_bytes(b"name: good\nquestion: \xff\xfe\n")
    with pytest.raises(ExperimentError, match=r"experiment\.yaml:2: the file: is not UTF-8 text \(byte 21\); save the file as UTF-8"):
        load_experiment(file, registries)


def test_a_directory_is_no_experiment(registries, tmp_path):
    with pytest.raises(ExperimentError, match="cannot be read: Is a directory; give a YAML file"):
        load_experiment(tmp_path, registries)


def test_an_endless_file_is_not_read_to_its_end(registries):
    with pytest.raises(ExperimentError, match="characters; an experiment has at most 200,000"):
        load_experiment(Path("/dev/zero"), registries)


def test_a_file_that_is_not_there_is_the_callers_mistake(registries, tmp_path):
    with pytest.raises(FileNotFoundError):
        load_experiment(tmp_path / "no.yaml", registries)


def test_a_base_whose_config_is_broken_is_refused(good, parse, registries, tmp_path):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")

    def read_config(base):
        return base.shape or json.loads((Path(base.path) / "config.json").read_text())

    broken = replace(registries, shape_of=read_config)
    with pytest.raises(ExperimentError, match=r":3: base: the config of broken cannot be read: Expecting property name"):
        parse_experiment(good.replace("base: tiny", "base: {path: broken}"), tmp_path / "experiment.yaml", broken)


def test_all_problems_of_a_file_are_told_at_once_in_its_order(good, parse):
    for old, new in [
        ("name: good", "name: Good"),
        ("base: tiny", "base: tinny"),
        ("measure: [divergence", "measure: [divergance"),
        ("at_most: 0.1", "at_most: low"),
        ("seed: 7", "seed: 7\nseed: 8"),
        ("group_size: 32", "group_size: 7"),
    ]:
        good = good.replace(old, new)
    with pytest.raises(ExperimentError) as caught:
        parse(good)
    places = [spell(problem.path) for problem in caught.value.problems]
    assert places == ["name", "base", "axes.quantize.int4[0].group_size", "measure[0]", "budgets[0].at_most", "seed"]


def test_a_broken_part_does_not_hide_what_can_be_judged_without_it(good, parse):
    """A typo in the grid used to end the judging: an unknown protocol and an impossible order came to light one run later each."""
    good = good.replace("grid: {exclude", "grid: {excluded").replace("bytes", "bites").replace("group_size: 32", "group_size: 48")
    with pytest.raises(ExperimentError) as caught:
        parse(good)
    assert [spell(problem.path) for problem in caught.value.problems] == ["axes.quantize.int4[0].group_size", "grid.excluded", "measure[1]"]


def test_an_unknown_protocol_is_not_told_again_by_the_budgets_that_need_it(good, parse):
    with pytest.raises(ExperimentError) as caught:
        parse(good.replace("measure: [divergence", "measure: [divergance"))
    assert [spell(problem.path) for problem in caught.value.problems] == ["measure[0]"]


def test_of_very_many_problems_the_first_are_told_and_the_rest_counted(good, parse):
    with pytest.raises(ExperimentError) as caught:
        parse(good + "".join(f"x{number}: 1\n" for number in range(60)))
    assert len(caught.value.problems) == 60
    assert str(caught.value).splitlines()[-1].endswith("experiment.yaml: and 10 more problems")


def test_two_hundred_patterns_over_five_thousand_points_are_judged_in_seconds(parse):
    """Each point was once made a mapping for each pattern, which took 8 s."""
    axes = "".join(
        f"  {axis}: {{none: [], {', '.join(f'{axis}{n}: [{{kind: prune_depth, layers: {n}, score: {score}}}]' for n in range(1, 70))}}}\n"
        for axis, score in (("a", "angular"), ("b", "block_influence"))
    )
    patterns = "".join(f"    - {{a: a{n % 69 + 1}, b: b{n // 69 + 1}}}\n" for n in range(200))
    started = time.monotonic()
    experiment = parse(f"name: x\nbase: unseen\nmeasure: [bytes]\nmax_variants: 5000\naxes:\n{axes}grid:\n  exclude:\n{patterns}")
    assert len(experiment.points) == 70 * 70 - 200
    assert time.monotonic() - started < 20


# --- whatever is written ---------------------------------------------------------------------------------------------------------------------

JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.just([]), st.just({}), st.just([[]]),
    st.sampled_from(["kind", "suite", "draft", "quantize", "variant", "int4", "d2", "small", "all", "name", "<name>", "none", "base", "tiny"]),
    st.dictionaries(st.sampled_from(["kind", "suite", "layers", "format", "method", "variant", "name", "hub", "for"]), st.text(max_size=4), max_size=3),
)  # fmt: skip


def places_in(tree, path=()):
    yield path
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield from places_in(value, (*path, key))


def changed(tree, path, how, junk):
    """``tree`` with the value at ``path`` deleted, replaced, or given ``junk`` beside it."""
    if not path:
        return junk if how == "replace" else tree
    inside = tree
    for part in path[:-1]:
        inside = inside[part]
    if how == "delete":
        del inside[path[-1]]
    elif how == "replace":
        inside[path[-1]] = junk
    elif isinstance(inside, list):
        inside.insert(path[-1], junk)
    else:
        inside[str(junk)[:50]] = inside[path[-1]]
    return tree


def judged(text, parse):
    """Parse ``text``: an experiment or problems that can be told; anything else that is raised fails the test."""
    started = time.monotonic()
    try:
        experiment = parse(text)
        assert experiment.variants
        assert build_graph(experiment).nodes
    except ExperimentError as error:
        assert error.problems
        assert len({(problem.path, problem.message) for problem in error.problems}) == len(error.problems)
        str(error).encode()
    assert time.monotonic() - started < 20


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_good_file_with_random_changes_is_an_experiment_or_refused(parse, good, data):
    tree = yaml.safe_load(good)
    for _ in range(data.draw(st.integers(1, 3))):
        if not isinstance(tree, dict | list):
            break
        path = data.draw(st.sampled_from(list(places_in(tree))))
        tree = changed(tree, path, data.draw(st.sampled_from(["delete", "replace", "insert"])), data.draw(JUNK))
    judged(yaml.safe_dump(tree, allow_unicode=True, sort_keys=False), parse)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.one_of(st.text(), st.text("{}[]:,-#&*!|>'\"%@`\n\t ?<=~.0123abc")))
def test_any_text_is_an_experiment_or_refused(parse, text):
    judged(text, parse)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.tuples(st.floats(0, 1), st.floats(0, 1)), between=st.text("{}[]:,-&*!'\" \n\tax0", max_size=4))
def test_a_good_file_with_a_piece_cut_out_is_an_experiment_or_refused(parse, good, cuts, between):
    start, stop = sorted(int(cut * len(good)) for cut in cuts)
    judged(good[:start] + between + good[stop:], parse)
