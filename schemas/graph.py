"""The graph that the variants of an experiment spell: one node per distinct prefix of steps. Pure; Dagster is met in ``assets``.

A node has one parent, the prefix without its last step, and for a model draft a second one: the draft's node. A draft that is trained, or cut
out of its target, has a node of its own between them, which every draft step that asks for the same model of the same weights shares.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from assay.schemas.base import Base
from assay.schemas.experiment import Experiment, Variant
from assay.schemas.spec import canonical_json
from assay.schemas.steps import RUNTIME_STEPS, Draft, DraftModel, Step
from assay.schemas.training import Distill

BASE = "base"
DRAFT_BASE = "draft_base"
DRAFT_MODEL = "draft_model"
RESERVED = frozenset({BASE, DRAFT_BASE, "facts", "reference", "report"})  # first or last parts of keys that no option may take


@dataclass(frozen=True)
class Node:
    """One prefix. ``path`` is its name below the experiment: the option names that spell it; ``base`` is set on bases alone."""

    path: tuple[str, ...]
    steps: tuple[Step | DraftModel, ...]
    parent: "Node | None" = None
    draft: "Node | None" = None
    base: Base | None = None

    @property
    def step(self) -> Step | DraftModel | None:
        return self.steps[-1] if self.steps else None

    @property
    def is_runtime(self) -> bool:
        return isinstance(self.step, RUNTIME_STEPS)

    @cached_property
    def checkpoint(self) -> "Node":
        """The last node of the chain that has weights of its own."""
        return self.parent.checkpoint if self.parent and self.is_runtime else self

    @cached_property
    def target(self) -> "Node":
        """The chain without a draft: what defines the output distribution."""
        return self.parent if self.parent and isinstance(self.step, Draft) else self

    @cached_property
    def root(self) -> "Node":
        return self.parent.root if self.parent else self

    @property
    def parents(self) -> "tuple[Node, ...]":
        """All that it is made from: the prefix, a draft's model, and for a distillation the base that teaches."""
        teacher = self.root if isinstance(self.step, Distill) and self.parent is not self.root else None
        return tuple(node for node in (self.parent, self.draft, teacher) if node is not None)


@dataclass(frozen=True)
class Graph:
    """The nodes of an experiment in build order, and the node that each variant ends at."""

    experiment: Experiment
    nodes: tuple[Node, ...]
    ends: Mapping[str, Node]  # by variant slug

    @property
    def base(self) -> Node:
        return self.nodes[0]


def build_graph(experiment: Experiment) -> Graph:
    """Every distinct prefix of every variant, parents before children; drafts that are variants bring theirs along."""
    variants = [*experiment.variants, *(found for each in experiment.variants if (found := draft_variant(experiment, each)))]
    names = _names(experiment, variants)
    taken = {*names.values()}  # also by the nodes that are named below
    nodes: dict[str, Node] = {_identity(()): Node((BASE,), (), base=experiment.base)}

    def draft_base(name: str) -> Node:
        path = (DRAFT_BASE, re.sub("[^a-z0-9]", "_", name))
        while any(node.path == path and node.base != experiment.draft_bases[name] for node in nodes.values()):
            path = (DRAFT_BASE, path[1] + "x")
        return nodes.setdefault(f"{DRAFT_BASE} {name}", Node(path, (), base=experiment.draft_bases[name]))

    def node_of(variant: Variant, upto: int) -> Node:
        steps = variant.steps[:upto]
        identity = _identity(steps)
        if identity not in nodes:
            parent, step, draft = node_of(variant, upto - 1), steps[-1], None
            if isinstance(step, Draft) and step.method == "variant":
                other = draft_variant(experiment, variant)
                if step.early_exit is None:
                    draft = node_of(other, len(other.steps)) if other else draft_base(str(step.base))
                if step.made is not None:
                    draft = made(step.made, parent.checkpoint, draft, names[identity][-1])
            nodes[identity] = Node(names[identity], steps, parent, draft)
        return nodes[identity]

    def made(model: DraftModel, target: Node, start: Node | None, option: str) -> Node:
        identity = f"{DRAFT_MODEL} {target.path} {start.path if start else ''} {canonical_json(model)}"
        if identity not in nodes:
            path = (*(() if target.base else target.path), f"{option}_{DRAFT_MODEL}")
            while path in taken:
                path = (*path[:-1], path[-1] + "x")
            taken.add(path)
            nodes[identity] = Node(path, (*target.steps, model), target, start)
        return nodes[identity]

    ends = {variant.slug: node_of(variant, len(variant.steps)) for variant in experiment.variants}
    return Graph(experiment, tuple(nodes.values()), ends)


def draft_variant(experiment: Experiment, variant: Variant) -> Variant | None:
    """The variant that drafts for ``variant``, if one does."""
    draft = variant.draft
    return experiment.variant(draft.variant) if draft and draft.variant is not None else None


def _identity(steps: tuple[Step, ...]) -> str:
    return canonical_json([step.model_dump(mode="json") for step in steps])


def _names(experiment: Experiment, variants: list[Variant]) -> dict[str, tuple[str, ...]]:
    """A path for every prefix: the options that end exactly there, else the option that it is within and the number of its step."""
    whole: dict[str, tuple[str, ...]] = {}
    within: dict[str, tuple[str, ...]] = {}
    for variant in variants:
        path: tuple[str, ...] = ()
        done = 0
        for axis, option in variant.options:
            steps = experiment.axes[axis][option]
            for count in range(1, len(steps)):
                within.setdefault(_identity(variant.steps[: done + count]), (*path, f"{option}_step{count}"))
            if steps:
                path, done = (*path, option), done + len(steps)
                whole.setdefault(_identity(variant.steps[:done]), path)
    taken = set(whole.values())
    for identity, path in within.items():
        while identity not in whole and path in taken:
            path = (*path[:-1], path[-1] + "x")
        whole.setdefault(identity, path)
        taken.add(path)
    return whole
