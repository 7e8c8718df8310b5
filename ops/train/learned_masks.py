"""Which layers, key groups, FFN channels and hidden channels to keep, learned with the weights: hard-concrete gates, pulled to a target shape.

Gates multiply what they may remove; at the end the likeliest are kept, as many as the target says. Not here: cutting the weights by the lists that
come out (``ops/prune/width.py``, ``ops/prune/depth.py``), or recovery after it.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from assay.ops.evaluate.divergence import head_of
from assay.ops.models import structure
from assay.ops.train import passes
from assay.ops.train.batches import Batch, batch_of, digest, generator, split
from assay.ops.train.domains import REFERENCE, Domains, identity, losses_of, reader, with_weights
from assay.ops.train.loop import Loss, Point, Progress, Settings, train
from assay.ops.train.losses import cross_entropy_sum, trainable_head
from assay.ops.train.overlap import states_of

LOW, HIGH, TEMPERATURE = -0.1, 1.1, 2 / 3  # of the hard-concrete distribution
OPEN = 3.0  # log α at first: a gate is 1 in 19 of 20 draws


class Target(NamedTuple):
    """How many of each kind are to be left; None leaves all of them, without a gate. Key groups and FFN channels are per layer."""

    layers: int | None = None
    kv_groups: int | None = None  # a key head, and the query heads that read it
    ffn: int | None = None
    hidden: int | None = None


class Kept(NamedTuple):
    """What is left, as rising lists of indices; key groups and FFN channels of each kept layer, in order."""

    layers: list[int]
    kv_groups: list[list[int]]
    ffn: list[list[int]]
    hidden: list[int]


class Learned(NamedTuple):
    """What to keep, and the curve that led there: held-out log perplexity with the hard masks of the moment, and expected sizes."""

    kept: Kept
    points: list[Point]


def open_probability(log_alpha: Float[Tensor, "*gates"]) -> Float[Tensor, "*gates"]:
    """P(z ≠ 0) = σ(log α − T · log(−low / high)), of a gate z that :func:`gate` draws."""
    return (log_alpha - TEMPERATURE * math.log(-LOW / HIGH)).sigmoid()


def gate(log_alpha: Float[Tensor, "*gates"], uniform: Float[Tensor, "*gates"]) -> Float[Tensor, "*gates"]:
    """A hard-concrete gate, 0 to 1, both with a probability above 0: clamp(low + (high − low) · σ((log u − log(1 − u) + log α) / T), 0, 1).

    Source:
        Louizos et al. 2017, §2.2, arXiv:1712.01312.
    """
    return (LOW + (HIGH - LOW) * ((uniform.logit() + log_alpha) / TEMPERATURE).sigmoid()).clamp(0, 1)


class Gates(nn.Module):
    """log α of every gate, by kind: ``layers`` [layers], ``kv_groups`` [layers, groups], ``ffn`` [layers, channels], ``hidden`` [channels]."""

    def __init__(self, sizes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.log_alpha = nn.ParameterDict({kind: nn.Parameter(torch.full(size, OPEN)) for kind, size in sizes.items()})

    def uniforms(self, random: torch.Generator) -> dict[str, Tensor]:
        """What one draw of all gates is made of; inside 0 to 1, ends left out."""
        return {
            kind: torch.rand(each.shape, generator=random, device=random.device).clamp(1e-6, 1 - 1e-6).to(each.device)
            for kind, each in self.log_alpha.items()
        }

    def draw(self, uniforms: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All gates, by :func:`gate`."""
        return {kind: gate(each, uniforms[kind]) for kind, each in self.log_alpha.items()}

    def expected(self) -> dict[str, Tensor]:
        """How many of each kind are open, in the mean over draws: a number, or one a layer."""
        return {kind: open_probability(each).sum(dim=-1) for kind, each in self.log_alpha.items()}

    def hard(self, target: Target) -> dict[str, Tensor]:
        """0 and 1: the likeliest of each kind, exactly as many as ``target`` says; of equal ones the first."""
        found = {}
        for kind, each in self.log_alpha.items():
            chosen = each.detach().argsort(dim=-1, descending=True, stable=True)[..., : getattr(target, kind)]
            found[kind] = torch.zeros_like(each.detach()).scatter_(-1, chosen, 1.0)
        return found


class Multipliers(nn.Module):
    """λ₁ and λ₂ of each constraint: one a kind, and one a layer for what is counted per layer."""

    def __init__(self, gates: Gates) -> None:
        super().__init__()
        self.first = nn.ParameterDict({kind: nn.Parameter(torch.zeros(each.shape[:-1])) for kind, each in gates.log_alpha.items()})
        self.second = nn.ParameterDict({kind: nn.Parameter(torch.zeros(each.shape[:-1])) for kind, each in gates.log_alpha.items()})

    def penalty(self, differences: Mapping[str, Tensor]) -> Tensor:
        """Σ λ₁ d + λ₂ d². Gates descend on it and multipliers ascend, though one optimizer descends on all: they get the negative of their gradient."""
        terms = [
            (_ascending(self.first[kind]) * difference + _ascending(self.second[kind]) * difference.square()).sum()
            for kind, difference in differences.items()
        ]
        return torch.stack(terms).sum()


def differences(gates: Gates, target: Target, share: float) -> dict[str, Tensor]:
    """d of each constraint: expected less wanted, as a share of what there is. ``share`` of the way to the target is wanted by now, 0 to 1."""
    found = {}
    for kind, expected in gates.expected().items():
        size = gates.log_alpha[kind].shape[-1]
        wanted = size - share * (size - getattr(target, kind))
        found[kind] = (expected - wanted) / size
    return found


def gates_for(model: Any, target: Target) -> Gates:
    """Gates of the kinds that ``target`` names, all open.

    Raises:
        ValueError: more is to be left than there is, nothing is to be left or nothing removed, or blocks without ``self_attn.o_proj`` and
            ``mlp.down_proj``.
    """
    numbers = structure.shape_numbers(model)
    layers = numbers["layers"]
    for block in structure.blocks(model):
        for path in ("self_attn.o_proj", "mlp.down_proj"):
            if not isinstance(_part(block, path), nn.Linear):
                raise ValueError(
                    f"a block of {type(model).__name__} has no linear {path}; models like Llama, with one attention and one FFN a block, were expected"
                )
    sizes = {
        "layers": (layers,), "kv_groups": (layers, numbers["kv_heads"]), "ffn": (layers, numbers["intermediate_size"]),
        "hidden": (numbers["hidden_size"],),
    }  # fmt: skip
    asked = {kind: count for kind, count in target._asdict().items() if count is not None}
    for kind, count in asked.items():
        if not 1 <= count <= sizes[kind][-1]:
            raise ValueError(f"{count} {kind} are to be left of {sizes[kind][-1]}; 1 to {sizes[kind][-1]} can be")
    if not asked:
        raise ValueError("the target leaves all layers, key groups, FFN and hidden channels; a number for one of them was expected")
    return Gates({kind: sizes[kind] for kind in asked})


@contextmanager
def masked(model: Any, masks: Mapping[str, Tensor]) -> Iterator[None]:
    """``model`` with what the masks name multiplied by them, inside.

    Hidden channels are masked where they are written: embedding, ``o_proj``, ``down_proj``. Norms still average over the full width, so a model that
    is cut to the open channels is the same when its norms' weights are multiplied by √(old width / new width).
    """
    hooks = []
    hidden = masks.get("hidden")
    if hidden is not None:
        hooks.append(structure.embedding(model)[1].register_forward_hook(_gating_outputs(hidden)))
    for number, block in enumerate(structure.blocks(model)):
        inner = {"self_attn.o_proj": masks.get("kv_groups"), "mlp.down_proj": masks.get("ffn")}
        for path, mask in inner.items():
            linear = _part(block, path)
            assert isinstance(linear, nn.Linear)
            if mask is not None:
                hooks.append(linear.register_forward_pre_hook(_gating_inputs(mask[number])))
            if hidden is not None:
                hooks.append(linear.register_forward_hook(_gating_outputs(hidden)))
            if "layers" in masks:
                hooks.append(linear.register_forward_hook(_gating_outputs(masks["layers"][number])))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def learn_masks(
    model: Any,
    windows: Int64[Tensor, "windows length"],
    held_out: Int64[Tensor, "held_out held_length"],
    target: Target,
    *,
    settings: Settings,
    gate_rate: float = 0.3,
    target_warmup_steps: int = 0,
    rows: int = 8,
    domains: Domains | None = None,
    vocabulary: int | None = None,
    state: Path | None = None,
    run: dict[str, Any] | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Learned:
    """Train gates, their multipliers, and those weights of ``model`` that require a gradient, in place, on what comes next in the text.

    Args:
        model: float32, dense, like Llama.
        gate_rate: the learning rate of gates and multipliers; that of the weights is ``settings.learning_rate``, with the same schedule.
        target_warmup_steps: over which the wanted sizes go from all to the target, in a straight line.
        domains: of the windows; a step then reads more of those whose loss, with the hard masks of the moment, is furthest above that of the model as it
            came, see ``domains.reader``.
        vocabulary: how many ids the tokenizer has; all of the head when None.
        state, run, progress: see ``loop.train``.
    Raises:
        ValueError: see :func:`gates_for` and ``loop.train``; or a warm-up as long as the run.
        DivergedError: see ``loop.train``.
    Source:
        Xia et al. 2023 (Sheared LLaMA), §3.1 and §3.2, arXiv:2310.06694. Unlike it: gates begin open, not half open; query heads go with their key head; norms
        are not taken over the open channels alone, see :func:`masked`; a kept gate counts 1 in the end, whatever its mean; AdamW's steps of gates are
        smaller than its 1.0.
    """
    gates = gates_for(model, target).to(model.device)
    multipliers = Multipliers(gates).to(model.device)
    if not 0 <= target_warmup_steps < settings.steps:
        raise ValueError(
            f"a warm-up of the target over {target_warmup_steps} of {settings.steps} steps; fewer than there are were expected"
        )
    size, device = min(vocabulary or len(head_of(model).weight), len(head_of(model).weight)), model.device
    drawn: dict[str, Tensor] = {}
    share = 0.0
    curve: list[Point] = []
    choose = reader(domains, curve, windows=len(windows), rows=rows, seed=settings.seed)

    def batches(step: int) -> list[Batch]:
        nonlocal share
        drawn.update(gates.uniforms(generator(settings.seed, "gates", step)))  # one draw a step, however many parts it has
        share = min(1.0, (step + 1) / (target_warmup_steps + 1))
        return split(batch_of(windows, choose(step), device), passes.FORWARD_TOKENS)

    def loss_of(batch: Batch) -> Loss:
        with masked(model, gates.draw(drawn)):
            states = passes.final_states(model, batch.ids)
        targets = batch.ids[:, 1:].flatten()
        total = cross_entropy_sum(targets, states[:, :-1].flatten(0, 1), trainable_head(model), vocabulary=size)
        return Loss(total + len(targets) * multipliers.penalty(differences(gates, target, share)), len(targets))

    def evaluate() -> dict[str, float]:
        with masked(model, gates.hard(target)):
            states = states_of(model, held_out)
        targets = held_out[:, 1:].flatten().to(device)
        total = cross_entropy_sum(targets, states[:, :-1].flatten(0, 1), head_of(model), vocabulary=size)
        found = {"log_perplexity": float(total) / len(targets)}
        found |= {f"expected_{kind}": float(each.mean()) for kind, each in gates.expected().items()}
        if domains is None:
            return found
        if curve:
            known = {name: value for name, value in curve[0].metrics.items() if name.startswith(REFERENCE)}
        else:  # before the first step, without a mask
            known = losses_of(domains, held_out, states_of(model, held_out), head_of(model), vocabulary=size, name=REFERENCE)
        return found | losses_of(domains, held_out, states, head_of(model), vocabulary=size) | known

    told = {
        "target": dict(target._asdict()), "gate_rate": gate_rate, "target_warmup_steps": target_warmup_steps, "rows": rows,
        "windows": list(windows.shape), "text": digest(windows), "vocabulary": size,
        "domains": identity(domains),
    }  # fmt: skip
    multiple = gate_rate / settings.learning_rate
    rates = {"gates.": multiple, "multipliers.": multiple}
    whole = nn.ModuleDict({"student": model, "gates": gates, "multipliers": multipliers})
    train(
        whole, batches, loss_of, settings, rates=rates, curve=curve, evaluate=evaluate, state=state, run={**told, **(run or {})}, progress=progress
    )  # fmt: skip
    points = with_weights(domains, curve)
    return Learned(kept_by(gates.hard(target), structure.shape_numbers(model)), points)


def kept_by(masks: Mapping[str, Tensor], numbers: Mapping[str, int | bool]) -> Kept:
    """The lists of indices that hard masks leave, of a model of ``structure.shape_numbers``."""
    layers = int(numbers["layers"])
    sizes = {"layers": (layers,), "kv_groups": (layers, numbers["kv_heads"]), "ffn": (layers, numbers["intermediate_size"]), "hidden": (numbers["hidden_size"],)}  # fmt: skip
    full = {kind: masks[kind] if kind in masks else torch.ones(size) for kind, size in sizes.items()}
    chosen = full["layers"].nonzero().flatten().tolist()
    groups, channels = ([full[kind][layer].nonzero().flatten().tolist() for layer in chosen] for kind in ("kv_groups", "ffn"))
    return Kept(chosen, groups, channels, full["hidden"].nonzero().flatten().tolist())


def _gating_inputs(mask: Tensor) -> Any:
    def hook(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return args[0] * mask.repeat_interleave(args[0].shape[-1] // len(mask)), *args[1:]

    return hook


def _gating_outputs(mask: Tensor) -> Any:
    return lambda _module, _args, output: output * mask


def _ascending(multiplier: Tensor) -> Tensor:
    """The multiplier, with the negative of its gradient."""
    return 2 * multiplier.detach() - multiplier


def _part(block: nn.Module, path: str) -> nn.Module | None:
    try:
        return block.get_submodule(path)
    except AttributeError:
        return None
