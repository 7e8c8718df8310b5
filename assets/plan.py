"""What an experiment comes to: every node and measurement, what is cached, what each will cost. Reads JSON only. Not here: running it."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import median

import dagster as dg

from assay.assets import labels
from assay.assets.footprints import decoder_of
from assay.assets.ledger import Ledger
from assay.assets.measurements import measured
from assay.schemas.base import Shape
from assay.schemas.experiment import Variant
from assay.schemas.graph import Node
from assay.schemas.manifest import Action
from assay.schemas.protocols import Acceptance, Arithmetic, Constrained, Distribution, Divergence, Outliers, Protocol, Speculation, Speed
from assay.schemas.pruning import PruneDepth, PruneExperts, PruneWeights, PruneWidth
from assay.schemas.rounding import Quantize, Rotate, Smooth
from assay.schemas.steps import DraftModel
from assay.schemas.training import Distill, Pretrain, PruneLearned

# Forward FLOPs per second on which a first guess rests where nothing like it has been built here; history replaces it at once.
GUESSED_FLOPS = 1e11
GUESSED_DECODE = 15  # tokens/s


@dataclass(frozen=True)
class Item:
    """One thing to build: an asset, what it is, whether the store has it, and the seconds it took or is thought to take.

    ``action`` is None while a parent is missing.
    """

    key: dg.AssetKey
    kind: str
    node: Node
    protocol: str | None
    digest: str | None
    seconds: float
    action: Action | None
    variant: Variant | None = None
    teacher: Action | None = None  # what the base says of the text that a distillation reads

    @property
    def cached(self) -> bool:
        return self.digest is not None

    @property
    def actions(self) -> tuple[Action, ...]:
        """All that the store keeps for it."""
        return tuple(action for action in (self.action, self.teacher) if action is not None)


def plan(ledger: Ledger) -> list[Item]:
    """Every item of the experiment in build order. An item behind a missing one counts as missing (early cut-off may still spare it)."""
    return list(_items(ledger))


def _items(ledger: Ledger) -> Iterator[Item]:
    graph, experiment, history = ledger.graph, ledger.experiment, History(ledger)
    for node in graph.nodes:
        kind = "base" if node.step is None else node.step.kind
        action = ledger.node(node)
        seconds = history.seconds(kind, action, node_guess(node, experiment.base.shape))
        teacher = ledger.teacher(node, node.step) if isinstance(node.step, Distill) else None
        yield Item(labels.node_key(experiment, node), kind, node, None, ledger.digest(node), seconds, action, teacher=teacher)
    for name, protocol in experiment.protocols.items():
        if isinstance(protocol, Divergence):
            action = ledger.reference(protocol)
            seconds = history.seconds("reference", action, guess(protocol, experiment.base.shape))
            digest = ledger.has(action) if action else None
            yield Item(labels.reference_key(experiment, name), "reference", graph.base, name, digest, seconds, action)
    shared: set[tuple[str, tuple[str, ...]]] = set()
    for variant in experiment.variants:
        node = graph.ends[variant.slug]
        for name in measured(graph, variant):
            protocol = experiment.protocols[name]
            action = ledger.measurement(node, protocol)
            subject = (name, (node.target if isinstance(protocol, Divergence) else node).path)
            seconds = 0.0  # a draft does not change the distribution, so its divergence is that of its target
            if subject not in shared:
                seconds = history.seconds(protocol.suite, action, guess(protocol, experiment.base.shape, draft=variant.draft is not None))
            shared.add(subject)
            digest = ledger.has(action) if action else None
            yield Item(labels.facts_key(experiment, node, name), protocol.suite, node, name, digest, seconds, action, variant)


class History:
    """How long things took in this store: the same action, else the median of its kind, else a guess from the base's shape."""

    def __init__(self, ledger: Ledger):
        self.store = ledger.workspace.store
        self._medians: dict[str, float | None] = {}

    def seconds(self, kind: str, action: Action | None, guessed: float) -> float:
        entry = self.store.lookup(action) if action else None
        if entry is not None:
            return entry.seconds
        if kind not in self._medians:
            taken = self.store.seconds_of(kind)
            self._medians[kind] = median(taken) if taken else None
        known = self._medians[kind]
        return guessed if known is None else known


def node_guess(node: Node, shape: Shape | None) -> float:
    """Seconds for a node of a base of ``shape`` that was never built here."""
    size = parameters(shape)
    if node.base is not None:
        return 10 + size / 1e7
    if isinstance(node.step, PruneDepth):
        return 2 + size / 1e8 + 2 * size * node.step.calibration.windows * node.step.calibration.length / GUESSED_FLOPS
    if isinstance(node.step, PruneWidth | PruneExperts | PruneWeights):
        text = node.step.calibration
        return 3 + size / 1e8 + (4 * size * text.windows * text.length / GUESSED_FLOPS if text else 0)
    if isinstance(node.step, PruneLearned):
        return 5 + size / 1e8 + 6 * size * node.step.tokens / GUESSED_FLOPS
    if isinstance(node.step, Pretrain):
        asked, vocabulary = node.step, shape.vocab_size if shape else 5e4
        weights = asked.parameters or 12 * asked.layers * asked.hidden**2 + vocabulary * asked.hidden
        return 5 + 6 * weights * asked.tokens / GUESSED_FLOPS
    if isinstance(node.step, Distill):  # a forward and a backward, and once the teacher's forward
        return 5 + size / 1e8 + (8 if node.step.teacher == "model" else 6) * size * node.step.tokens / GUESSED_FLOPS
    if isinstance(node.step, DraftModel):  # the teacher's forward, and of a draft of half its size a forward and a backward
        return 2 + size / 1e8 + (5 * size * node.step.distill.tokens / GUESSED_FLOPS if node.step.distill else 0)
    if isinstance(node.step, Smooth | Rotate | Quantize):
        return 3 + size / 2e7 + _calibrated(node.step, size) / GUESSED_FLOPS
    return 0.05


def _calibrated(step: Smooth | Rotate | Quantize, size: float) -> float:
    """About the FLOPs of a step that looks at text: forwards over it, one or a few for each thing that is tried."""
    if step.calibration is None:
        return 0.0
    tokens, mixed = step.calibration.windows * step.calibration.length, step.mixed if isinstance(step, Quantize) else None
    if isinstance(step, Rotate):
        return 8 * size * step.calibration.length * step.steps
    if mixed is not None:  # every layer in every format
        return 2 * size * (tokens + 66 * len(mixed.formats) * mixed.windows * step.calibration.length)
    return 2 * size * tokens * (20 if step.method == "awq" else 4)


def guess(protocol: Protocol, shape: Shape | None, *, draft: bool = False) -> float:
    """Seconds for a measurement of a variant of a base of ``shape``."""
    size = parameters(shape)
    if isinstance(protocol, Divergence):
        return 2 + 2.5 * size * protocol.tokens / GUESSED_FLOPS
    if isinstance(protocol, Speed):
        decoded = (protocol.repeats + 1) * protocol.new_tokens * (2 if draft else 1) / GUESSED_DECODE
        return 2 + decoded * size / 1.35e8 + (protocol.repeats + 1) * 2 * size * protocol.prefill_tokens / GUESSED_FLOPS
    if isinstance(protocol, Acceptance):
        return 2 + 2 * protocol.prompts * protocol.new_tokens / GUESSED_DECODE * size / 1.35e8
    if isinstance(protocol, Speculation):
        return 2 + 2 * sum(protocol.batches) * (protocol.repeats + 1) * protocol.new_tokens / GUESSED_DECODE * size / 1.35e8
    if isinstance(protocol, Constrained):
        return 5 + 14 * protocol.samples * 12 / GUESSED_DECODE * size / 1.35e8
    if isinstance(protocol, Distribution):
        return 2 + 2 * size * protocol.tokens / GUESSED_FLOPS + 2.5e-3 * protocol.tokens * len(protocol.temperatures)
    if isinstance(protocol, Outliers):  # two forwards, and a look at all that is read
        return 2 + 5 * size * protocol.windows * protocol.length / GUESSED_FLOPS
    if isinstance(protocol, Arithmetic):  # answers of about four tokens, about eight times as fast side by side
        drawn = protocol.problems * sum(protocol.samples if temperature else 1 for temperature in protocol.temperatures)
        return 5 + (drawn / 8 + protocol.problems) * 4 / GUESSED_DECODE * size / 1.35e8
    return 0.2


def parameters(shape: Shape | None) -> float:
    """About how many weights a model of ``shape`` has; 1.35e8 where the shape is not known."""
    if shape is None:
        return 1.35e8
    return decoder_of(shape).parameters


def missing(items: Iterable[Item]) -> list[Item]:
    return [item for item in items if not item.cached]
