"""One node for each distinct prefix of steps, with names that no two nodes share."""

import itertools
import json
import re

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from assay.schemas.base import Base
from assay.schemas.graph import build_graph
from assay.schemas.load import parse_experiment

LAX = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])

RECOVERY = """
name: x
base: unseen
measure: [bytes]
axes:
  prune:
    none: []
    depth4: [{kind: prune_depth, layers: 4}]
    depth4_kd: [{kind: prune_depth, layers: 4}, {kind: prune_depth, layers: 1, score: angular}]
  quantize:
    none: []
    int4: [{kind: quantize, format: int4}]
"""


def paths(graph):
    return ["/".join(node.path) for node in graph.nodes]


def count_by_hand(axes):
    """Distinct prefixes of every variant and of every draft that is a variant, from the text of the steps alone; and the draft bases."""
    prefixes, bases = {()}, set()

    def walk(options):
        texts = [text for axis, option in options.items() for text in axes[axis][option]]
        prefixes.update(tuple(texts[:count]) for count in range(len(texts) + 1))
        for draft in map(json.loads, texts):
            if "variant" in draft:
                walk({axis: draft["variant"].get(axis, "none") for axis in axes})
            if "base" in draft:
                bases.add(draft["base"])

    for point in itertools.product(*axes.values()):
        walk(dict(zip(axes, point, strict=True)))
    return len(prefixes) + len(bases)


@LAX
@given(data=st.data())
def test_one_node_for_each_distinct_prefix(written, build, data):
    axes = data.draw(written)
    assert len(build_graph(build(axes)).nodes) == count_by_hand(axes)


@LAX
@given(data=st.data())
def test_names_are_keys_and_no_two_nodes_share_one(written, build, data):
    nodes = build_graph(build(data.draw(written))).nodes
    assert all(re.fullmatch(r"[a-z0-9]+(_[a-z0-9]+)*", part) for node in nodes for part in node.path)
    assert len({node.path for node in nodes}) == len(nodes)
    assert len({"__".join(node.path) for node in nodes}) == len(nodes)


@LAX
@given(data=st.data())
def test_parents_and_drafts_come_before_what_needs_them(written, build, data):
    seen = set()
    for node in build_graph(build(data.draw(written))).nodes:
        for needed in filter(None, (node.parent, node.draft)):
            assert needed.path in seen
        seen.add(node.path)
        if node.parent:
            assert node.steps[:-1] == node.parent.steps
            assert node.root.base is not None
        else:
            assert node.base is not None
            assert node.steps == ()


@LAX
@given(data=st.data())
def test_every_variant_ends_at_the_node_of_its_steps(written, build, data):
    experiment = build(data.draw(written))
    graph = build_graph(experiment)
    assert list(graph.ends) == [variant.slug for variant in experiment.variants]
    assert all(graph.ends[variant.slug].steps == variant.steps for variant in experiment.variants)
    assert len({node.path for node in graph.ends.values()}) == len(experiment.variants)


@LAX
@given(data=st.data())
def test_weights_and_the_output_distribution_are_defined_by_the_nodes_before_runtime_steps(written, build, data):
    for node in build_graph(build(data.draw(written))).nodes:
        kinds = [step.kind for step in node.steps]
        assert [step.kind for step in node.checkpoint.steps] == [kind for kind in kinds if kind not in ("kv", "draft")]
        assert [step.kind for step in node.target.steps] == [kind for kind in kinds if kind != "draft"]


def test_options_of_several_steps_share_the_steps_that_they_begin_with(parse):
    graph = build_graph(parse(RECOVERY))
    assert paths(graph) == ["base", "int4", "depth4", "depth4/int4", "depth4_kd", "depth4_kd/int4"]
    assert graph.ends["depth4_kd__none"].parent is graph.ends["depth4__none"]


def test_a_step_within_an_option_that_no_option_ends_at_is_numbered(parse):
    graph = build_graph(parse(RECOVERY.replace("    depth4: [{kind: prune_depth, layers: 4}]\n", "")))
    assert paths(graph) == ["base", "int4", "depth4_kd_step1", "depth4_kd", "depth4_kd/int4"]


def test_two_options_share_a_numbered_step(parse):
    more = "    depth6: [{kind: prune_depth, layers: 4}, {kind: prune_depth, layers: 2}]\n  quantize:"
    graph = build_graph(parse(RECOVERY.replace("    depth4: [{kind: prune_depth, layers: 4}]\n", "").replace("  quantize:", more)))
    assert paths(graph) == ["base", "int4", "depth4_kd_step1", "depth4_kd", "depth4_kd/int4", "depth6", "depth6/int4"]
    assert graph.ends["depth4_kd__none"].parent is graph.ends["depth6__none"].parent


def test_an_option_with_the_name_of_a_numbered_step_keeps_it_and_the_step_gives_way(parse):
    """A step within ``kd`` would be called ``kd_step1``, as the user called an option; both become Dagster keys."""
    text = RECOVERY.replace("    depth4: [{kind: prune_depth, layers: 4}]", "    kd_step1: [{kind: prune_depth, layers: 9}]").replace(
        "depth4_kd:", "kd:"
    )
    graph = build_graph(parse(text))
    assert graph.ends["kd_step1__none"].path == ("kd_step1",)
    assert graph.ends["kd_step1__none"].steps[0].layers == 9
    assert graph.ends["kd__none"].parent.path == ("kd_step1x",)
    more = RECOVERY.replace(
        "    depth4:", "    kd_step1x: [{kind: prune_depth, layers: 8}]\n    kd_step1: [{kind: prune_depth, layers: 9}]\n    other:"
    )
    nodes = build_graph(parse(more.replace("depth4_kd:", "kd:").replace("    other: [{kind: prune_depth, layers: 4}]\n", ""))).nodes
    assert ("kd_step1xx",) in {node.path for node in nodes}


def test_a_variant_that_drafts_is_a_second_parent(good, parse):
    graph = build_graph(parse(good))
    drafted = graph.ends["none__int4__none__small"]
    assert drafted.path == ("int4", "small")
    assert drafted.parent is graph.ends["none__int4__none__none"]
    assert drafted.draft is graph.ends["d2__none__none__none"]
    assert graph.ends["none__int4__none__ngram"].draft is None


def test_a_draft_outside_the_grid_is_built_and_not_measured(parse, good):
    graph = build_graph(parse(good.replace("{exclude: [{prune: d2, draft: small}]}", "{exclude: [{prune: d2}]}")))
    assert "d2__none__none__none" not in graph.ends
    assert ("d2",) in {node.path for node in graph.nodes}


def test_a_draft_base_is_a_root_of_its_own(good, parse):
    text = good.replace("variant: {prune: d2}", "base: sibling")
    graph = build_graph(parse(text))
    node = graph.ends["none__none__none__small"].draft
    assert (node.path, node.base.name, node.root) == (("draft_base", "sibling"), "sibling", node)
    assert graph.base.path == ("base",)


def test_a_draft_base_that_no_variant_reaches_is_not_built(good, parse):
    text = good.replace("variant: {prune: d2}", "base: sibling").replace(
        "{exclude: [{prune: d2, draft: small}]}", "{exclude: [{draft: small}]}"
    )
    assert not [node for node in build_graph(parse(text)).nodes if node.path[0] == "draft_base"]


def test_draft_bases_whose_names_differ_in_a_dot_are_two_nodes(good, registries, tmp_path):
    for name in ("m-1.5", "m-1_5"):
        registries.bases[name] = Base(name=name, path=name)
    both = "small: [{kind: draft, method: variant, base: m-1.5}]\n    other: [{kind: draft, method: variant, base: m-1_5}]"
    text = good.replace("small: [{kind: draft, method: variant, variant: {prune: d2}}]", both)
    nodes = build_graph(parse_experiment(text, tmp_path / "x.yaml", registries)).nodes
    assert {node.path: node.base.name for node in nodes if node.path[0] == "draft_base"} == {
        ("draft_base", "m_1_5"): "m-1.5",
        ("draft_base", "m_1_5x"): "m-1_5",
    }


def test_the_base_drafts_for_its_variants(good, parse):
    graph = build_graph(parse(good.replace("variant: {prune: d2}", "variant: {}")))
    assert graph.ends["none__int4__none__small"].draft is graph.base


# --- models made for a draft -----------------------------------------------------------------------------------------------------------------

LESSON = "distill: {tokens: 1000}"


def made(graph):
    return [node for node in graph.nodes if node.step and node.step.kind == "draft_model"]


def test_a_trained_draft_stands_between_its_target_and_the_variant_it_began_as(good, parse):
    graph = build_graph(parse(good.replace("variant: {prune: d2}", f"variant: {{prune: d2}}, {LESSON}")))
    drafted = graph.ends["none__int4__none__small"]
    model = drafted.draft
    assert (drafted.path, model.path) == (("int4", "small"), ("int4", "small_draft_model"))
    assert model.parent is graph.ends["none__int4__none__none"] and model.draft is graph.ends["d2__none__none__none"]
    assert drafted.parent is model.parent
    assert (model.step.distill.tokens, model.step.early_exit) == (1000, None)
    assert model.checkpoint is model and model.target is model and not model.is_runtime
    assert graph.ends["none__none__none__small"].draft.path == ("small_draft_model",)


def test_an_early_exit_comes_out_of_its_target_alone(good, parse):
    graph = build_graph(parse(good.replace("variant: {prune: d2}", "early_exit: 2")))
    model = graph.ends["d1__int4__none__small"].draft
    assert (model.path, model.parent.path, model.draft) == (("d1", "int4", "small_draft_model"), ("d1", "int4"), None)
    assert (model.step.early_exit, model.step.distill) == (2, None)


def test_one_model_is_trained_for_every_number_of_proposals_and_every_kv_format(good, parse):
    """Neither changes what is trained: a sweep over them would otherwise train the same draft again each time."""
    options = "".join(
        f"\n    small{tokens}: [{{kind: draft, method: variant, variant: {{prune: d2}}, tokens: {tokens}, {LESSON}}}]"
        for tokens in (2, 3, 5)
    )
    text = good.replace("\n    small: [{kind: draft, method: variant, variant: {prune: d2}}]", options)
    graph = build_graph(parse(text.replace("draft: small}", "draft: [small2, small3, small5]}")))
    assert len(made(graph)) == 4  # for the targets base, d1, int4 and d1/int4: d2 drafts for all but itself
    drafts = {graph.ends[f"none__int4__{kv}__small{tokens}"].draft for kv in ("none", "fp8") for tokens in (2, 3, 5)}
    assert [node.path for node in drafts] == [("int4", "small2_draft_model")]


def test_another_lesson_another_start_and_another_target_are_other_models(good, parse):
    options = f"""
    small: [{{kind: draft, method: variant, variant: {{prune: d2}}, {LESSON}}}]
    longer: [{{kind: draft, method: variant, variant: {{prune: d2}}, distill: {{tokens: 2000}}}}]
    other: [{{kind: draft, method: variant, variant: {{prune: d1}}, {LESSON}}}]
    first: [{{kind: draft, method: variant, early_exit: 1, {LESSON}}}]
    sibling: [{{kind: draft, method: variant, base: sibling, {LESSON}}}]"""
    graph = build_graph(parse(good.replace("\n    small: [{kind: draft, method: variant, variant: {prune: d2}}]", options)))
    mine = [node.path[-1] for node in made(graph) if len(node.path) == 1]
    assert mine == [f"{name}_draft_model" for name in ("small", "longer", "other", "first", "sibling")]
    assert graph.ends["none__none__none__sibling"].draft.draft.path == ("draft_base", "sibling")
    assert len({node.path for node in graph.nodes}) == len(graph.nodes)


def test_an_option_with_the_name_of_a_draft_model_keeps_it(good, parse):
    text = good.replace("variant: {prune: d2}", f"variant: {{prune: d2}}, {LESSON}").replace("fp8:", "small_draft_model:")
    graph = build_graph(parse(text))
    assert graph.ends["none__none__small_draft_model__none"].path == ("small_draft_model",)
    assert graph.ends["none__none__none__small"].draft.path == ("small_draft_modelx",)
