"""The planner: which declared variant of a base serves a goal best on a device, by prediction and by measured quality, and what is not known yet.

Not here: footprints (``footprints.py``), the arithmetic (``ops/cost/plan.py``), the words (``advice_text.py``), the file that settles it (``settle.py``).
"""

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from assay.assets.devices import HERE_NAME, Machine, machine
from assay.assets.footprints import Unknown, measured_footprint, predicted_footprint
from assay.assets.workspace import Workspace
from assay.ops.cost.plan import Footprint, Goal, Prediction, batch_that_fits, memory_bytes, order, predict
from assay.schemas.experiment import Experiment, Variant
from assay.schemas.graph import draft_variant
from assay.schemas.rounding import Quantize
from assay.schemas.spec import canonical_json
from assay.schemas.steps import Draft, Kv, Step, rounding_of
from assay.warehouse.devices import device_digest, device_row

KNOWN_KL = "kl_mean_nats"


class Candidate(NamedTuple):
    """A variant, what is known of it, and what it should take."""

    experiment: Experiment
    variant: Variant
    facts: dict[str, float]
    footprint: Footprint | Unknown
    how: Literal["measured", "predicted", "unknown"]  # its footprint
    prediction: Prediction | None
    missing: tuple[str, ...]  # suites

    @property
    def name(self) -> str:
        return f"{self.experiment.name}/{self.variant.slug}"

    @property
    def kl(self) -> float | None:
        """Mean divergence in nats; 0 of the base itself, None where it was not measured."""
        return self.facts.get(KNOWN_KL) if self.variant.steps else 0.0


class Asked(NamedTuple):
    """What is asked for. ``batch`` is the most texts at once; ``at_most_kl`` in nats."""

    base: str
    goal: Goal
    context: int
    batch: int
    device: str
    memory_bytes: float
    at_most_kl: float | None


class Advice(NamedTuple):
    """Every candidate in one list: the best first; too far from the base; too large for the memory; and those of which the cost is not known."""

    asked: Asked
    machine: Machine
    ranked: list[Candidate]
    too_far: list[Candidate]
    too_large: list[Candidate]
    unknown: list[Candidate]
    residuals: list[float]  # ln(measured / predicted) of what was timed on this device, where that is the one asked for


def advise(
    workspace: Workspace,
    *,
    base: str,
    goal: Goal,
    context: int,
    batch: int,
    device: str,
    memory_gib: float | None,
    at_most_kl: float | None,
) -> Advice:
    """Rank all variants of ``base`` that the workspace's experiments declare, each once.

    For throughput each is given as many texts as fit into the memory, up to ``batch``. A variant whose divergence is not measured is ranked as well,
    and told to be unmeasured.

    Raises:
        ValueError: no experiment has that base, or the device is not known.
    """
    experiments, _ = workspace.experiments()
    mine = [each for each in experiments if each.base.name == base]
    if not mine:
        bases = sorted({each.base.name for each in experiments})
        raise ValueError(f"no experiment of this workspace has the base {base!r}; there are experiments on {', '.join(bases) or 'none'}")
    found = machine(workspace, device)
    asked = Asked(base, goal, context, batch, device, found.memory_bytes if memory_gib is None else memory_gib * 2**30, at_most_kl)
    facts, timed = _known(workspace, base, here=device == HERE_NAME)
    advice = Advice(asked, found, [], [], [], [], timed)
    for candidate in _candidates(facts, mine, asked, found):
        if candidate.prediction is None or order(candidate.prediction, goal) == float("inf"):
            advice.unknown.append(candidate)
        elif candidate.prediction.memory_bytes > asked.memory_bytes:
            advice.too_large.append(candidate)
        elif at_most_kl is not None and candidate.kl is not None and candidate.kl > at_most_kl:
            advice.too_far.append(candidate)
        else:
            advice.ranked.append(candidate)
    for part in (advice.ranked, advice.too_far, advice.too_large):
        part.sort(key=lambda each: (order(each.prediction, goal), each.name))  # type: ignore[arg-type]
    return advice


def _known(workspace: Workspace, base: str, *, here: bool) -> tuple[dict[tuple[str, str], dict[str, float]], list[float]]:
    from assay.warehouse.candidates import known, residuals
    from assay.warehouse.database import connect

    with connect(workspace.facts.root) as connection:
        return known(connection, base=base, device=device_digest()), residuals(connection, device=device_digest()) if here else []


def _candidates(
    facts: dict[tuple[str, str], dict[str, float]], experiments: Sequence[Experiment], asked: Asked, on: Machine
) -> Iterator[Candidate]:
    """Each chain of steps once: of the experiment that knows most about it."""
    chosen: dict[str, tuple[Experiment, Variant]] = {}
    for experiment in experiments:
        for variant in experiment.variants:
            other = draft_variant(experiment, variant)
            key = canonical_json(
                [step.model_dump(mode="json", exclude={"variant"}) for step in (*variant.steps, *(other.steps if other else ()))]
            )
            before = chosen.get(key)
            if before is None or len(facts.get((experiment.name, variant.slug), {})) > len(facts.get((before[0].name, before[1].slug), {})):
                chosen[key] = (experiment, variant)
    for experiment, variant in chosen.values():
        yield _candidate(experiment, variant, facts.get((experiment.name, variant.slug), {}), asked, on)


def _candidate(experiment: Experiment, variant: Variant, facts: dict[str, float], asked: Asked, on: Machine) -> Candidate:
    footprint: Footprint | Unknown | None = measured_footprint(facts, variant.steps)
    how: Literal["measured", "predicted", "unknown"] = "measured"
    if footprint is None:
        footprint = predicted_footprint(experiment.base, variant.steps)
        how = "unknown" if isinstance(footprint, Unknown) else "predicted"
    prediction = None if isinstance(footprint, Unknown) else _predict(footprint, variant.steps, asked, on)
    draft = bool(variant.steps) and isinstance(variant.steps[-1], Draft)
    wanted = {
        "bytes": how != "measured",
        "divergence": bool(variant.steps) and KNOWN_KL not in facts,
        "acceptance": draft and "tokens_per_round" not in facts,
        "speed": asked.device == HERE_NAME and "decode_tok_s" not in facts,
    }
    return Candidate(
        experiment, variant, facts, footprint, how, prediction, tuple(suite for suite, is_wanted in wanted.items() if is_wanted)
    )


def _predict(footprint: Footprint, steps: Sequence[Step], asked: Asked, on: Machine) -> Prediction:
    here_on_cpu = asked.device == HERE_NAME and device_row().kind == "cpu"
    if here_on_cpu and not any(isinstance(step, Kv) for step in steps):
        footprint = footprint._replace(
            kv_bytes_per_token=2 * footprint.kv_bytes_per_token
        )  # the engine's cache is float32, billed in bfloat16
    _, rate = on.rate("float32" if here_on_cpu else arithmetic(steps))
    batch = asked.batch
    if asked.goal == "throughput":
        batch = max(1, min(batch, batch_that_fits(footprint, asked.memory_bytes, context=asked.context)))
    found = predict(footprint, context=asked.context, batch=batch, bandwidth=on.bandwidth, rate=rate, launch=on.launch_seconds)
    return found._replace(memory_bytes=memory_bytes(footprint, context=asked.context, batch=batch))


def arithmetic(steps: Sequence[Step]) -> str:
    """The dtype that products run in: that of rounded inputs where a step rounds them, else bfloat16; weights in fewer bits alone do not change it."""
    inputs = next((step.inputs for step in reversed(steps) if isinstance(step, Quantize)), None)
    return inputs.format if inputs is not None and inputs.format != "int4" else "bfloat16"


def in_four_bits(candidate: Candidate) -> bool:
    """Whether the weights are in a 4-bit format."""
    rounded = (rounding_of(step) for step in candidate.variant.steps)
    return any(grid is not None and grid.format in ("int4", "nf4", "mxfp4", "nvfp4") for grid in rounded)
