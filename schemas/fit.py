"""Whether an experiment can be done at all: orders of steps, widths, drafts, names, the size of the grid. Needs no model, only its shape."""

from collections.abc import Iterator, Mapping
from math import prod

from assay.schemas.base import Shape
from assay.schemas.experiment import Experiment, ExperimentFile, Options, empty_option, matches, spelled
from assay.schemas.graph import RESERVED
from assay.schemas.protocols import METRICS, suite_of
from assay.schemas.spec import canonical_json
from assay.schemas.steps import RUNTIME_STEPS, Draft, PruneDepth, Quantize, Step
from assay.schemas.yaml import Path_, Problem

Points = tuple[tuple[str, ...], ...]

# Columns that every experiment's view has: an axis of that name would hide one.
COLUMNS = frozenset(
    {"experiment", "variant", "base", "status", "device", "timing_status", "tokens", *(m for suite in METRICS.values() for m in suite)}
)


def judge(experiment: Experiment, parsed: ExperimentFile, reserved: frozenset[str]) -> tuple[list[Problem], Points]:
    """Every reason why the experiment cannot be done, and its grid points (none where the axes themselves are wrong)."""
    problems = list(_names(experiment, reserved))
    points, found = _grid(experiment, parsed)
    problems += found
    problems += _options(experiment)
    if not problems:
        problems += _orders(experiment, points)
    problems += _drafts(experiment)
    problems += _budgets(experiment, points)
    return problems, points


def _names(experiment: Experiment, reserved: frozenset[str]) -> Iterator[Problem]:
    if experiment.name in reserved:
        yield Problem(("name",), f"{experiment.name!r} is a table or view of the warehouse", "choose another name: it becomes a view")
    if not experiment.axes:
        yield Problem(("axes",), "there are none", "give at least one axis with its options")
    owner: dict[str, str] = {}
    for axis, options in experiment.axes.items():
        if axis in COLUMNS:
            yield Problem(("axes", axis), f"{axis!r} is a column of every result table", "choose another name for the axis")
        if not options:
            yield Problem(
                ("axes", axis), "has no options", "give it options, each a list of steps; `none: []` is the one that does nothing"
            )
        seen: dict[str, str] = {}
        for option, steps in options.items():
            path = ("axes", axis, option)
            if option in RESERVED:
                yield Problem(path, f"the name {option!r} is taken", "choose another name for the option")
            identity = canonical_json([step.model_dump(mode="json") for step in steps])
            if identity in seen:
                yield Problem(path, f"has the same steps as {seen[identity]!r}", "keep one of them")
            seen[identity] = option
            if steps and option in owner:
                yield Problem(
                    path, f"the option {option!r} exists on the axis {owner[option]!r} too", f"rename one, for example {axis}_{option}"
                )
            if steps:
                owner[option] = axis


def _grid(experiment: Experiment, parsed: ExperimentFile) -> tuple[Points, list[Problem]]:
    axes, problems = experiment.axes, []
    if not axes or not all(axes.values()):
        return (), problems
    include: list[Options] = [{}]
    exclude: list[Options] = []
    if parsed.grid != "all":
        for key, patterns in (("include", parsed.grid.include or []), ("exclude", parsed.grid.exclude)):
            for index, pattern in enumerate(patterns):
                problems += _pattern(experiment, ("grid", key, index), pattern)
        include = [{}] if parsed.grid.include is None else parsed.grid.include
        exclude = parsed.grid.exclude
    if problems:
        return (), problems
    asked = sum(prod(sum(axis not in p or matches(p, {axis: o}) for o in options) for axis, options in axes.items()) for p in include)
    if asked > parsed.max_variants:
        sizes = " × ".join(str(len(options)) for options in axes.values())
        return (), [Problem(("grid",), f"the grid has {asked:,} variants ({sizes}), more than max_variants = {parsed.max_variants:,}",
                            "narrow it with grid: {include: [...]}, or raise max_variants (at most 5,000)")]  # fmt: skip
    kept: dict[tuple[str, ...], None] = {}
    for pattern in include:
        for point in spelled(pattern, axes):
            if not any(matches(each, dict(zip(axes, point, strict=True))) for each in exclude):
                kept[point] = None
    if not kept:
        return (), [Problem(("grid",), "no variant is left", "loosen include or exclude")]
    everything = {point: index for index, point in enumerate(kept)}
    return tuple(
        sorted(
            kept, key=lambda point: [list(options).index(o) for o, options in zip(point, axes.values(), strict=True)] or everything[point]
        )
    ), []


def _pattern(experiment: Experiment, path: Path_, pattern: Mapping[str, str | list[str]]) -> Iterator[Problem]:
    for axis, wanted in pattern.items():
        if axis not in experiment.axes:
            yield Problem((*path, axis), f"no axis is named {axis!r}", f"there are {', '.join(experiment.axes)}")
            continue
        for option in [wanted] if isinstance(wanted, str) else wanted:
            if option not in experiment.axes[axis]:
                yield Problem((*path, axis), f"the axis {axis!r} has no option {option!r}", f"it has {', '.join(experiment.axes[axis])}")


def _options(experiment: Experiment) -> Iterator[Problem]:
    """Each step against the shape of the base."""
    shape = experiment.base.shape
    for axis, options in experiment.axes.items():
        for option, steps in options.items():
            for index, step in enumerate(steps):
                path = ("axes", axis, option, index)
                if isinstance(step, Quantize) and shape is not None:
                    yield from _widths(path, step, shape)
                if isinstance(step, PruneDepth) and shape is not None and step.layers >= shape.layers:
                    yield Problem((*path, "layers"), f"removes {step.layers} of the {shape.layers} layers", f"at most {shape.layers - 1}")


def _widths(path: Path_, step: Quantize, shape: Shape) -> Iterator[Problem]:
    widths = {
        "q_proj, k_proj, v_proj, gate_proj and up_proj": shape.hidden_size,
        "o_proj": shape.heads * shape.head_dim,
        "down_proj": shape.intermediate_size,
    }
    if step.group_size != -1:
        bad = [f"{columns} columns of {name}" for name, columns in widths.items() if columns % step.group_size]
        if bad:
            fitting = [size for size in (32, 64, 128, 256, 512) if all(columns % size == 0 for columns in widths.values())]
            yield Problem((*path, "group_size"), f"{step.group_size} does not divide the {bad[0]}",
                          f"{' or '.join(map(str, fitting)) or 'none of the usual sizes'} would, and -1 is one group a row")  # fmt: skip
    if shape.tied and step.head == "quantize" and step.embeddings == "skip":
        yield Problem(
            (*path, "head"), "the head of this base is its embedding, which is skipped", "say embeddings: quantize too, or head: untie"
        )
    if shape.tied and step.embeddings == "quantize" and step.head == "skip":
        yield Problem(
            (*path, "embeddings"), "the embedding of this base is its head, which is skipped", "say head: quantize too, or head: untie"
        )
    if not shape.tied and step.head == "untie":
        yield Problem((*path, "head"), "the head of this base is not tied", "say head: quantize")


def _orders(experiment: Experiment, points: Points) -> list[Problem]:
    """The order of steps in every variant; each offending pair of places is told once."""
    found: dict[tuple[Path_, str], Problem] = {}
    same: dict[str, str] = {}
    layers = experiment.base.shape.layers if experiment.base.shape else None
    for point in points:
        placed: list[tuple[Path_, Step]] = []
        for axis, option in zip(experiment.axes, point, strict=True):
            placed += [(("axes", axis, option, index), step) for index, step in enumerate(experiment.axes[axis][option])]
        left = layers
        for position, (path, step) in enumerate(placed):
            before = [earlier for _, earlier in placed[:position]]
            problem = _order(path, step, before)
            if isinstance(step, PruneDepth) and left is not None:
                left -= step.layers
                if left < 1 and problem is None:
                    problem = Problem(
                        (*path, "layers"), f"with the steps before it, removes {layers - left} of the {layers} layers", "remove fewer"
                    )  # type: ignore[operator]
            if problem:
                found.setdefault((problem.path, problem.message), problem)
        slug = "__".join(point)
        identity = canonical_json([step.model_dump(mode="json") for _, step in placed])
        if identity in same:
            problem = Problem(("grid",), f"the variants {same[identity]} and {slug} have the same steps", "exclude one of them")
            found.setdefault((problem.path, problem.message), problem)
        same.setdefault(identity, slug)
    return list(found.values())


def _order(path: Path_, step: Step, before: list[Step]) -> Problem | None:
    kinds = [earlier.kind for earlier in before]
    if "draft" in kinds:
        what = "a second draft" if isinstance(step, Draft) else f"{step.kind} after a draft"
        return Problem(
            path,
            f"{what}: a draft speculates for the variant before it, so it comes last",
            "move the draft's axis to the end; one draft a variant",
        )
    if not isinstance(step, RUNTIME_STEPS):
        runtime = [earlier.kind for earlier in before if isinstance(earlier, RUNTIME_STEPS)]
        if runtime:
            return Problem(
                path,
                f"{step.kind} after {runtime[0]}: weights are changed before it is said how they run",
                f"move the axis of {runtime[0]} behind it",
            )
        if "quantize" in kinds:
            return Problem(path, f"{step.kind} after quantize: codes cannot be {'quantized again' if step.kind == 'quantize' else 'pruned'}",
                           "one quantize, as the last weight step")  # fmt: skip
    elif step.kind in kinds:
        return Problem(path, f"a second {step.kind} step", "one a variant")
    return None


def _drafts(experiment: Experiment) -> Iterator[Problem]:
    for axis, options in experiment.axes.items():
        for option, steps in options.items():
            for index, step in enumerate(steps):
                if not isinstance(step, Draft) or step.method != "variant":
                    continue
                path = ("axes", axis, option, index)
                if step.base is not None:
                    other = experiment.draft_bases.get(step.base)
                    mine = experiment.base.shape
                    if other and other.shape and mine and other.shape.vocab_size != mine.vocab_size:
                        yield Problem((*path, "base"), f"{step.base} has {other.shape.vocab_size:,} tokens, {experiment.base.name} has {mine.vocab_size:,}",
                                      "a draft needs the vocabulary of its target")  # fmt: skip
                    continue
                named = dict(step.variant or {})
                bad = list(_pattern(experiment, (*path, "variant"), named))
                yield from bad
                if bad:
                    continue
                try:
                    chosen = {each: named.get(each) or empty_option(opts) for each, opts in experiment.axes.items()}
                except KeyError:
                    yield Problem(
                        (*path, "variant"),
                        "leaves out an axis whose options all have steps",
                        f"name an option of each of {', '.join(experiment.axes)}",
                    )
                    continue
                chain = _draft_chain(experiment, chosen, (axis, option))
                if chain:
                    what = "a cycle of drafts" if chain[-1] == option else "the draft has a draft of its own"
                    yield Problem((*path, "variant"), f"{what}: {' → '.join([option, *chain])}", "a draft is a variant without a draft")
                    continue
                flat = [each for axis_, option_ in chosen.items() for each in experiment.axes[axis_][option_]]
                if any(problem for n, each in enumerate(flat) if (problem := _order(path, each, flat[:n]))):
                    yield Problem(
                        (*path, "variant"),
                        "the variant that it names has its steps in an impossible order",
                        "name one that could stand in the grid",
                    )


def _draft_chain(experiment: Experiment, chosen: dict[str, str], start: tuple[str, str]) -> list[str]:
    """The options by which a draft leads to further drafts, up to the first that comes again."""
    chain: list[str] = []
    while True:
        following = [(axis, option) for axis, option in chosen.items() for step in experiment.axes[axis][option] if isinstance(step, Draft)]
        if not following:
            return chain
        axis, option = following[0]
        chain.append(option)
        step = next(step for step in experiment.axes[axis][option] if isinstance(step, Draft))
        if (axis, option) == start or option in chain[:-1] or step.variant is None:
            return chain
        try:
            chosen = {each: step.variant.get(each) or empty_option(options) for each, options in experiment.axes.items()}
        except KeyError:
            return chain
        if any(chosen[each] not in experiment.axes[each] for each in chosen):
            return chain


def _budgets(experiment: Experiment, points: Points) -> Iterator[Problem]:
    suites = {protocol.suite for protocol in experiment.protocols.values()}
    for index, budget in enumerate(experiment.budgets):
        path = ("budgets", index)
        suite = suite_of(budget.metric)
        if suite is None:
            yield Problem(
                (*path, "metric"), f"no metric is named {budget.metric!r}", f"there are {', '.join(m for s in METRICS.values() for m in s)}"
            )
        elif suite not in suites and experiment.protocols:
            yield Problem(
                (*path, "metric"), f"{budget.metric} comes from the suite {suite!r}, which is not measured", f"add {suite} to measure"
            )
        bad = list(_pattern(experiment, (*path, "for"), budget.where))
        yield from bad
        if not bad and points and not any(matches(budget.where, dict(zip(experiment.axes, point, strict=True))) for point in points):
            yield Problem((*path, "for"), "selects no variant of the grid", "loosen it")
