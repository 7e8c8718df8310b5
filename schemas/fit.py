"""Whether an experiment can be done at all: orders of steps, widths, drafts, names, the size of the grid. Needs no model, only its shape."""

from collections.abc import Iterator, Mapping
from itertools import product
from math import prod

from assay.schemas.base import Shape
from assay.schemas.experiment import LARGEST_GRID, Experiment, ExperimentFile, Options, allowed, empty_option, matches
from assay.schemas.explain import unknown
from assay.schemas.graph import RESERVED
from assay.schemas.metrics import METRICS, suite_of
from assay.schemas.protocols import Acceptance, Speculation, Speed
from assay.schemas.pruning import Pack, PruneDepth, PruneExperts, PruneWeights, PruneWidth
from assay.schemas.rounding import Quantize, Rotate
from assay.schemas.spec import canonical_json
from assay.schemas.steps import RUNTIME_STEPS, Draft, RuntimeStep, Step, WeightStep, rounding_of
from assay.schemas.training import Distill, Pretrain, PruneLearned
from assay.schemas.widths import left, unfit
from assay.schemas.yaml import Path_, Problem

Point = tuple[str, ...]
Points = tuple[Point, ...]
Placed = list[tuple[Path_, Step]]  # the steps of a variant, each with its place in the file

PRUNING = PruneDepth | PruneWidth | PruneExperts | PruneWeights | PruneLearned
RUNTIME_KINDS = frozenset(step.model_fields["kind"].default for step in RUNTIME_STEPS)
SPEAKING = (Acceptance, Speed, Speculation)  # protocols that decode with a draft
LARGEST_PRODUCT = 20_000  # points before `exclude`; more are not even listed
LONGEST_SLUG = 200  # characters; a slug becomes part of a file name

# Columns that every experiment's view has: an axis of that name would hide one.
COLUMNS = frozenset(
    {"experiment", "variant", "base", "status", "device", "timing_status", "tokens", *(m for suite in METRICS.values() for m in suite)}
)


def judge(experiment: Experiment, parsed: ExperimentFile, reserved: frozenset[str]) -> tuple[list[Problem], Points]:
    """Every reason why the experiment cannot be done, and its grid points (none where the axes themselves are wrong)."""
    points, problems = _grid(experiment, parsed)
    problems += _names(experiment, reserved)
    problems += _options(experiment)
    problems += _orders(experiment, points, {problem.path for problem in problems})
    if not problems:
        problems += _slugs(experiment, points)
    problems += _drafts(experiment)
    problems += _budgets_of_tokens(experiment)
    problems += _budgets(experiment, points)
    return problems, points


def _names(experiment: Experiment, reserved: frozenset[str]) -> Iterator[Problem]:
    if experiment.name in reserved:
        yield Problem(("name",), f"{experiment.name!r} is a table or view of the warehouse", "choose another name: it becomes a view")
    owner: dict[str, str] = {}
    for axis, options in experiment.axes.items():
        if axis in COLUMNS:
            yield Problem(("axes", axis), f"{axis!r} is a column of every result table", "choose another name for the axis")
        if not options:
            remedy = "give it options, each a list of steps; `none: []` is the one that does nothing"
            yield Problem(("axes", axis), "has no options", remedy)
        seen: dict[str, str] = {}
        for option, steps in options.items():
            path = ("axes", axis, option)
            if option in RESERVED:
                yield Problem(path, f"the name {option!r} is taken", f"choose another, for example {axis}_{option}")
            identity = _identity(steps)
            if identity in seen:
                yield Problem(path, f"has the same steps as {seen[identity]!r}", "keep one of them")
            seen[identity] = option
            if steps and option in owner:
                message = f"the option {option!r} exists on the axis {owner[option]!r} too"
                yield Problem(path, message, f"rename one, for example {axis}_{option}")
            if steps:
                owner[option] = axis


def _grid(experiment: Experiment, parsed: ExperimentFile) -> tuple[Points, list[Problem]]:
    axes, problems = experiment.axes, []
    if not all(axes.values()):
        return (), problems
    include: list[Options] = [{}]
    exclude: list[Options] = []
    if parsed.grid != "all":
        include = [{}] if parsed.grid.include is None else parsed.grid.include
        exclude = parsed.grid.exclude
        for key, patterns in (("include", parsed.grid.include or []), ("exclude", exclude)):
            for index, pattern in enumerate(patterns):
                problems += _pattern(experiment, ("grid", key, index), pattern)
    if problems:
        return (), problems
    choices = [allowed(pattern, axes) for pattern in include]
    asked = sum(prod(map(len, choice)) for choice in choices)
    kept: set[Point] = set()
    if asked <= LARGEST_PRODUCT:
        without = [[(axis, set(options)) for axis, options in enumerate(allowed(pattern, axes))] for pattern in exclude]
        kept = {
            point
            for choice in choices
            for point in product(*choice)
            if not any(all(point[axis] in wanted for axis, wanted in each) for each in without)
        }
    if asked > LARGEST_PRODUCT or len(kept) > parsed.max_variants:
        sizes = " × ".join(str(len(options)) for options in axes.values())
        message = f"the grid has {len(kept) or asked:,} variants (axes: {sizes}), more than max_variants = {parsed.max_variants:,}"
        remedy = f"narrow it with grid: {{include: [...]}}, or raise max_variants (at most {LARGEST_GRID:,})"
        return (), [Problem(("axes" if parsed.grid == "all" else "grid",), message, remedy)]
    if not kept:
        return (), [Problem(("grid",), "no variant is left", "loosen include or exclude")]
    ranks = [{option: rank for rank, option in enumerate(options)} for options in axes.values()]
    return tuple(sorted(kept, key=lambda point: [rank[option] for rank, option in zip(ranks, point, strict=True)])), []


def _pattern(experiment: Experiment, path: Path_, pattern: Mapping[str, str | list[str]]) -> Iterator[Problem]:
    for axis, wanted in pattern.items():
        if axis not in experiment.axes:
            yield Problem((*path, axis), *unknown("axis", axis, experiment.axes))
            continue
        for option in [wanted] if isinstance(wanted, str) else wanted:
            if option not in experiment.axes[axis]:
                yield Problem((*path, axis), *unknown(f"option of {axis}", option, experiment.axes[axis]))


def _options(experiment: Experiment) -> Iterator[Problem]:
    """The steps of each option against the shape of the base."""
    for axis, options in experiment.axes.items():
        for option, steps in options.items():
            shape = experiment.base.shape
            for index, step in enumerate(steps):
                path = ("axes", axis, option, index)
                if isinstance(step, Draft) and step.distill and step.distill.quantize:
                    other = experiment.draft_bases[step.base].shape if step.base and step.base in experiment.draft_bases else None
                    if other or shape:
                        yield from unfit((*path, "distill", "quantize"), step.distill.quantize, other or shape)  # type: ignore[arg-type]
                elif shape is not None and not isinstance(step, RuntimeStep):
                    found = _unfit_after(path, step, shape, experiment.base.shape)
                    yield from found
                    shape = None if found else left(step, shape)


# --- the order of steps in a variant ---------------------------------------------------------------------------------------------------------


def _placed(experiment: Experiment, point: Point) -> Placed:
    chosen = zip(experiment.axes, point, strict=True)
    return [(("axes", axis, option, index), step) for axis, option in chosen for index, step in enumerate(experiment.axes[axis][option])]


def _orders(experiment: Experiment, points: Points, known: set[Path_]) -> list[Problem]:
    """What is impossible in the order of a variant's steps, once a place, however many variants have it."""
    found: dict[Path_, Problem] = {}
    for point in points:
        for problem in _order(experiment, _placed(experiment, point)):
            if problem.path not in known:
                found.setdefault(problem.path, problem)
    return list(found.values())


def _order(experiment: Experiment, placed: Placed) -> Iterator[Problem]:
    """Each step after those before it: their kinds, and the shape that they leave."""
    start = shape = experiment.base.shape
    before: list[Step] = []
    for path, step in placed:
        problem = _after(path, step, before)
        if problem:
            yield problem
        elif isinstance(step, RuntimeStep):
            if isinstance(step, Draft) and step.early_exit is not None and shape is not None:
                problem = _early(path, step.early_exit, shape.layers)
                if problem:
                    yield problem
        elif shape is not None:
            bad = _unfit_after(path, step, shape, start)
            yield from bad
            shape = None if bad else left(step, shape)
        before.append(step)


def _unfit_after(path: Path_, step: WeightStep, shape: Shape, start: Shape | None) -> list[Problem]:
    """What of ``step`` does not fit ``shape``, which the steps before it made of ``start``."""
    found = list(unfit(path, step, shape))
    if shape == start:
        return found
    more = ", or exclude the combination from the grid"
    return [Problem(each.path, f"{each.message}, after the steps before it", f"{each.remedy}{more}") for each in found]


def _early(path: Path_, kept: int, layers: int) -> Problem | None:
    """An early exit that leaves its target nothing to do."""
    if kept < layers:
        return None
    remedy = f"at most {layers - 1}" if layers > 1 else "leave early_exit out"
    return Problem((*path, "early_exit"), f"the first {kept} of the {layers} layers that the target has are not fewer than all", remedy)


def _after(path: Path_, step: Step, earlier: list[Step]) -> Problem | None:
    """What is wrong with ``step`` after the steps ``earlier``."""
    before = [each.kind for each in earlier]
    if "draft" in before:
        what = "a second draft" if isinstance(step, Draft) else f"{step.kind} after a draft"
        remedy = "one draft a variant, on the last axis"
        return Problem(path, f"{what}, but a draft speculates for what is before it", remedy)
    if isinstance(step, RUNTIME_STEPS):
        return (
            Problem(path, f"a second {step.kind} step in one variant", "keep one, or exclude the combination")
            if step.kind in before
            else None
        )
    runtime = next((kind for kind in before if kind in RUNTIME_KINDS), None)
    if runtime:
        message = f"{step.kind} after {runtime}, but weights are changed before it is said how they run"
        return Problem(path, message, f"move the axis of {step.kind} before that of {runtime}")
    if "rotate" in before and isinstance(step, PRUNING | Distill):
        return Problem(
            path, f"{step.kind} after rotate, but it reads channels as they were", f"move the axis of {step.kind} before that of rotate"
        )
    if "prune_weights" in before and isinstance(step, PruneWidth | PruneExperts | PruneLearned | Rotate):
        return Problem(
            path, f"{step.kind} after prune_weights, whose zeros it would move or fill", "move the axis of prune_weights after it"
        )
    if "prune_weights" in before and isinstance(step, Distill) and step.lora is not None:
        return Problem(
            (*path, "lora"), "adapters after prune_weights, which would fill its zeros when they are merged", "train the weights themselves"
        )
    if "prune_weights" in before and isinstance(step, Quantize) and step.method in ("e8", "additive"):
        return Problem(path, f"{step.method} after prune_weights, whose zeros it would fill", "rtn, gptq and hqq keep zeros")
    if isinstance(step, Rotate) and "rotate" in before:
        return Problem(path, "a second rotate step in one variant", "keep one, or exclude the combination")
    if isinstance(step, Pretrain) and before:
        return Problem(path, f"pretrain after {before[-1]}, but it begins from nothing", "put it first, on an axis before the others")
    if isinstance(step, Pack) and not any(isinstance(each, PruneWeights) and each.pattern == step.pattern for each in earlier):
        return Problem(path, "pack, but nothing before it makes 2:4 weights", "a prune_weights step with pattern 2:4 before it does")
    if "pack" in before:
        return Problem(
            path, f"{step.kind} after pack, but packed weights are not changed again", "pack as the last step that changes weights"
        )
    rounded = next((each for each in earlier if rounding_of(each)), None)
    if rounded is None or (isinstance(step, Pack) and _in_int8(rounded)):
        return None
    if isinstance(step, Pack):
        return Problem(
            path, "pack after rounding, of which int8 codes alone are stored as 2:4", "format: int8 before it, or leave pack out"
        )
    joint = "" if isinstance(rounded, Quantize) else f"{rounded.kind} with "
    what = "a second quantize step" if isinstance(step, Quantize) and not joint else f"{step.kind} after {joint}quantize"
    return Problem(path, f"{what}, but integer codes are not changed again", "one quantize step, as the last that changes weights")


def _in_int8(step: Step) -> bool:
    """Whether ``step`` leaves plain int8 codes in every block."""
    plain = not isinstance(step, Quantize) or (step.mixed is None and step.method in ("rtn", "gptq", "hqq"))
    grid = rounding_of(step)
    return grid is not None and grid.format == "int8" and plain


def _slugs(experiment: Experiment, points: Points) -> Iterator[Problem]:
    """A variant whose name is too long, or that has two names."""
    longest = max(("__".join(point) for point in points), key=len, default="")
    if len(longest) > LONGEST_SLUG:
        message = f"the variant {longest[:40]}… has a name of {len(longest)} characters, joined from its options"
        yield Problem(("axes",), message, f"shorten the names of the options: at most {LONGEST_SLUG} together")
    slugs: dict[str, list[str]] = {}
    for point in points:
        slugs.setdefault(_identity(tuple(step for _, step in _placed(experiment, point))), []).append("__".join(point))
    same = [names for names in slugs.values() if len(names) > 1]
    if same:
        others = f" (and {len(same) - 1} more such groups)" if len(same) > 1 else ""
        yield Problem(("axes",), f"the variants {' and '.join(same[0][:4])} have the same steps{others}", "exclude all but one of each")


def _identity(steps: tuple[Step, ...]) -> str:
    return canonical_json([step.model_dump(mode="json") for step in steps])


# --- drafts and budgets ----------------------------------------------------------------------------------------------------------------------


def _drafts(experiment: Experiment) -> Iterator[Problem]:
    for axis, options in experiment.axes.items():
        for option, steps in options.items():
            for index, step in enumerate(steps):
                if isinstance(step, Draft) and step.variant is not None:
                    yield from _draft_variant(
                        experiment, ("axes", axis, option, index, "variant"), (axis, option), step.variant, trained=step.distill is not None
                    )
                elif isinstance(step, Draft) and step.base is not None:
                    yield from _draft_base(experiment, ("axes", axis, option, index, "base"), step.base)


def _budgets_of_tokens(experiment: Experiment) -> Iterator[Problem]:
    """A draft that proposes more in a round than a protocol lets a text have."""
    shortest = min((protocol.new_tokens for protocol in experiment.protocols.values() if isinstance(protocol, SPEAKING)), default=None)
    for axis, options in experiment.axes.items():
        for option, steps in options.items():
            for index, step in enumerate(steps):
                if isinstance(step, Draft) and shortest is not None and step.tokens > shortest:
                    message = (
                        f"proposes {step.tokens} tokens a round, but a protocol of this experiment asks for {shortest} new tokens in all"
                    )
                    yield Problem(("axes", axis, option, index, "tokens"), message, f"at most {shortest}, or raise new_tokens")


def _draft_base(experiment: Experiment, path: Path_, name: str) -> Iterator[Problem]:
    other = experiment.draft_bases[name].shape if name in experiment.draft_bases else None
    mine = experiment.base.shape
    if other and mine and other.vocab_size != mine.vocab_size:
        message = f"{name} has a vocabulary of {other.vocab_size:,}, its target {experiment.base.name} one of {mine.vocab_size:,}"
        yield Problem(path, message, "name a base with the vocabulary of the target, or use method: ngram")


def _draft_variant(
    experiment: Experiment, path: Path_, start: tuple[str, str], named: Mapping[str, str], *, trained: bool
) -> Iterator[Problem]:
    bad = list(_pattern(experiment, path, named))
    if bad:
        yield from bad
        return
    chosen = _chosen(experiment, named)
    if chosen is None:
        full = next(axis for axis, options in experiment.axes.items() if axis not in named and all(options.values()))
        if experiment.axes[full]:  # else it has a problem of its own
            remedy = f"name one of {', '.join(experiment.axes[full])}"
            yield Problem(path, f"leaves out the axis {full!r}, whose options all have steps", remedy)
        return
    chain = _draft_chain(experiment, chosen, start)
    if chain:
        what = "is a cycle of drafts" if chain[-1] in (start[1], *chain[:-1]) else "names a draft that has a draft of its own"
        yield Problem(path, f"{what}: {' → '.join([start[1], *chain])}", "name a variant without a draft")
        return
    placed = _placed(experiment, tuple(chosen[axis] for axis in experiment.axes))
    problem = next(_order(experiment, placed), None)
    if problem:
        yield Problem(path, f"names a variant that cannot be: {problem.message}", problem.remedy)
        return
    for _, step in placed if trained else []:
        if rounding_of(step):
            message = "is trained but already quantized, and integer codes are not changed again"
            yield Problem(path, message, "name the variant without quantize, and say distill: {quantize: ...} to round it after training")
        elif isinstance(step, RUNTIME_STEPS):
            message = f"is trained but has a {step.kind} step, and only its weights are taken"
            yield Problem(path, message, f"name the variant without {step.kind}: a trained draft runs with the KV format of its target")


def _chosen(experiment: Experiment, named: Mapping[str, str]) -> dict[str, str] | None:
    """The option on each axis, the empty one where none is named; None where there is no such variant."""
    try:
        chosen = {axis: named.get(axis) or empty_option(options) for axis, options in experiment.axes.items()}
    except KeyError:
        return None
    return chosen if all(option in experiment.axes[axis] for axis, option in chosen.items()) else None


def _draft_chain(experiment: Experiment, chosen: dict[str, str] | None, start: tuple[str, str]) -> list[str]:
    """The options by which a draft leads to further drafts, up to the first that comes again."""
    chain: list[str] = []
    while chosen is not None:
        found = ((axis, option, step) for axis, option in chosen.items() for step in experiment.axes[axis][option])
        axis, option, step = next(((a, o, s) for a, o, s in found if isinstance(s, Draft)), (None, "", None))
        if step is None:
            break
        chain.append(option)
        if (axis, option) == start or option in chain[:-1] or step.variant is None:
            break
        chosen = _chosen(experiment, step.variant)
    return chain


def _budgets(experiment: Experiment, points: Points) -> Iterator[Problem]:
    suites = {protocol.suite for protocol in experiment.protocols.values()}
    metrics = [metric for suite in METRICS.values() for metric in suite]
    for index, budget in enumerate(experiment.budgets):
        path = ("budgets", index)
        suite = suite_of(budget.metric)
        if suite is None:
            yield Problem((*path, "metric"), *unknown("metric", budget.metric, metrics))
        elif suite not in suites and experiment.protocols:
            yield Problem(
                (*path, "metric"), f"{budget.metric} comes from the suite {suite!r}, which is not measured", f"add {suite} to measure"
            )
        bad = list(_pattern(experiment, (*path, "for"), budget.where))
        yield from bad
        if not bad and points and not any(matches(budget.where, dict(zip(experiment.axes, point, strict=True))) for point in points):
            yield Problem((*path, "for"), "selects no variant of the grid", "loosen it, or add the variants to the grid")
