"""What an experiment comes to: its grid, the names of its variants, its budgets, its defaults."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from assay.schemas.load import ExperimentError

LAX = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])

THREE_BY_TWO = """
name: x
base: tiny
measure: [bytes]
axes:
  p: {none: [], p1: [{kind: prune_depth, layers: 1}], p2: [{kind: prune_depth, layers: 2}]}
  q: {none: [], q8: [{kind: quantize, format: int8}]}
"""


def points(experiment):
    return ["/".join(point) for point in experiment.points]


def test_a_good_file_says_what_it_says(good, parse):
    experiment = parse(good)
    assert (experiment.name, experiment.question, experiment.seed) == ("good", "What does it cost?", 7)
    assert (experiment.base.name, experiment.base.shape.layers) == ("tiny", 4)
    assert (experiment.resources.gpu, experiment.resources.memory) == (1, "80Gi")
    assert experiment.axes["prune"]["d2"][0].calibration.windows == 8
    assert experiment.protocols["quick"].repeats == 2
    assert len(experiment.points) == 3 * 2 * 2 * 3 - 2 * 2  # d2 with the draft small is excluded, over two axes of two options


def test_the_product_in_declared_order(parse):
    assert points(parse(THREE_BY_TWO)) == ["none/none", "none/q8", "p1/none", "p1/q8", "p2/none", "p2/q8"]


@pytest.mark.parametrize(
    ("grid", "expected"),
    [
        ("{include: [{p: p1}]}", ["p1/none", "p1/q8"]),
        ("{include: [{p: p1, q: q8}]}", ["p1/q8"]),  # a pattern over two axes once allowed nothing
        ("{include: [{p: [p2, none], q: q8}]}", ["none/q8", "p2/q8"]),
        ("{include: [{q: q8}, {p: p1}]}", ["none/q8", "p1/none", "p1/q8", "p2/q8"]),  # either; once each; in declared order
        ("{include: [{}]}", ["none/none", "none/q8", "p1/none", "p1/q8", "p2/none", "p2/q8"]),
        ("{exclude: [{p: p1}]}", ["none/none", "none/q8", "p2/none", "p2/q8"]),
        ("{exclude: [{p: [p1, p2], q: q8}]}", ["none/none", "none/q8", "p1/none", "p2/none"]),
        ("{exclude: [{p: p1}, {q: q8}]}", ["none/none", "p2/none"]),
        ("{include: [{p: p1}, {q: q8}], exclude: [{p: none}, {p: p1, q: q8}]}", ["p1/none", "p2/q8"]),
        ("{}", ["none/none", "none/q8", "p1/none", "p1/q8", "p2/none", "p2/q8"]),
    ],
)
def test_include_and_exclude_worked_by_hand(parse, grid, expected):
    assert points(parse(f"{THREE_BY_TWO}grid: {grid}\n")) == expected


def test_excluded_variants_do_not_count_against_max_variants(parse):
    assert len(parse(f"{THREE_BY_TWO}grid: {{exclude: [{{q: q8}}]}}\nmax_variants: 3\n").points) == 3


def test_variants_included_twice_do_not_count_twice(parse):
    assert len(parse(f"{THREE_BY_TWO}grid: {{include: [{{p: p1}}, {{p: p1}}]}}\nmax_variants: 2\n").points) == 2


def test_the_base_is_added_where_it_is_no_grid_point(parse):
    variants = parse(f"{THREE_BY_TWO}grid: {{include: [{{p: p1}}]}}\n").variants
    assert [variant.slug for variant in variants] == ["base", "p1__none", "p1__q8"]
    assert (variants[0].options, variants[0].steps) == ((), ())


def test_the_base_comes_first_under_its_own_name_where_it_is_a_grid_point(parse):
    variants = parse(
        THREE_BY_TWO.replace("{none: [], q8: [{kind: quantize, format: int8}]}", "{q8: [{kind: quantize, format: int8}], none: []}")
    ).variants
    assert [variant.slug for variant in variants] == ["none__none", "none__q8", "p1__q8", "p1__none", "p2__q8", "p2__none"]


def test_an_option_left_out_is_the_empty_one(parse):
    experiment = parse(THREE_BY_TWO)
    assert experiment.variant({"p": "p2"}).slug == "p2__none"
    assert experiment.variant({}).steps == ()


def test_an_option_left_out_where_none_is_empty_is_an_error(parse):
    with pytest.raises(KeyError, match="no option without steps"):
        parse(THREE_BY_TWO.replace("q: {none: [], ", "q: {")).variant({"p": "p1"})


def test_budgets_hold_for_the_variants_that_they_select(parse):
    experiment = parse(f"""{THREE_BY_TWO}
grid: {{include: [{{p: [p1, p2]}}]}}
budgets:
  - {{metric: size_bytes, at_most: 1}}
  - {{metric: size_bytes, at_most: 2, for: {{p: p1}}}}
  - {{metric: size_bytes, at_most: 3, for: {{p: [p1, p2], q: q8}}}}
""")
    bounds = {variant.slug: [budget.at_most for budget in experiment.budgets_of(variant)] for variant in experiment.variants}
    assert bounds == {"base": [1], "p1__none": [1, 2], "p1__q8": [1, 2, 3], "p2__none": [1], "p2__q8": [1, 3]}


def test_acceptance_is_measured_where_there_are_drafts(good, parse):
    assert list(parse(good).protocols) == ["divergence", "bytes", "quick", "acceptance"]
    assert list(parse(THREE_BY_TWO).protocols) == ["bytes"]


def test_acceptance_of_ones_own_is_not_joined_by_another(good, parse):
    own = parse(good.replace("{suite: speed, name: quick, repeats: 2}", "{suite: acceptance, name: mine, prompts: 1}"))
    assert list(own.protocols) == ["divergence", "bytes", "mine"]


def test_the_name_of_a_protocol_is_no_part_of_it(good, parse):
    """Two names for one way of measuring are one protocol digest, so that its facts are shared."""
    protocol = parse(good).protocols["quick"]
    assert "name" not in protocol.model_dump()
    assert type(protocol).__name__ == "Speed"


def test_an_ngram_draft_looks_up_three_tokens_and_a_stride_is_a_window_less_one(good, parse):
    experiment = parse(good)
    assert experiment.axes["draft"]["ngram"][0].ngram == 3
    assert experiment.protocols["divergence"].stride == 511


def test_a_base_in_a_directory_beside_the_file(good, parse, tmp_path):
    (tmp_path / "My Model.v2").mkdir()
    (tmp_path / "My Model.v2" / "config.json").write_text("{}")
    base = parse(good.replace("base: tiny", "base: {path: My Model.v2, dtype: float32}")).base
    assert (base.name, base.path, base.dtype) == ("my-model.v2", str(tmp_path / "My Model.v2"), "float32")


def test_a_hub_base_is_named_by_its_last_part(good, parse):
    base = parse(good.replace("base: tiny", f"base: {{hub: Org/Qwen3-0.6B, revision: '{'0a' * 20}'}}")).base
    assert (base.name, base.hub, base.shape) == ("qwen3-0.6b", "Org/Qwen3-0.6B", None)


def test_numbers_as_people_write_them(good, parse):
    """YAML 1.1 reads 1e-3 as text, which is a trap; 200_000 it reads as we do."""
    experiment = parse(
        good.replace("at_most: 0.1", "at_most: 1e-3").replace("measure: [divergence", "measure: [{suite: divergence, tokens: 200_000}")
    )
    assert experiment.budgets[0].at_most == 0.001
    assert experiment.protocols["divergence"].tokens == 200_000


def test_line_ends_of_windows_and_a_byte_order_mark_are_read(good, parse):
    assert parse("\ufeff" + good.replace("\n", "\r\n")).points == parse(good).points


def test_a_vocabulary_that_is_not_known_yet_is_no_error(good, parse):
    assert parse(good.replace("variant: {prune: d2}", "base: unseen")).draft_bases["unseen"].shape is None


@LAX
@given(data=st.data())
def test_slugs_are_injective(written, build, data):
    experiment = build(data.draw(written))
    slugs = [variant.slug for variant in experiment.variants]
    assert len(set(slugs)) == len(slugs)
    assert {tuple(slug.split("__")) for slug in slugs} == {
        tuple(option for _, option in variant.options) for variant in experiment.variants
    }


@LAX
@given(data=st.data())
def test_a_pattern_keeps_what_a_plain_filter_keeps(written, build, data):
    axes = data.draw(written)
    pattern = st.fixed_dictionaries(
        {}, optional={axis: st.lists(st.sampled_from(sorted(options)), min_size=1, unique=True) for axis, options in axes.items()}
    )
    include, exclude = data.draw(st.lists(pattern, min_size=1, max_size=3)), data.draw(st.lists(pattern, max_size=2))
    everything = [dict(zip(axes, point, strict=True)) for point in build(axes).points]

    def keeps(point, patterns):
        return any(all(point[axis] in wanted for axis, wanted in each.items()) for each in patterns)

    expected = [tuple(point.values()) for point in everything if keeps(point, include) and not keeps(point, exclude)]
    if expected:
        assert list(build(axes, grid={"include": include, "exclude": exclude}).points) == expected
    else:
        with pytest.raises(ExperimentError, match="no variant is left"):
            build(axes, grid={"include": include, "exclude": exclude})
