"""The training loop: AdamW over float32 weights, cosine with warm-up, accumulation, clipping, states to go on from, and the curve.

A step is a pure function of the weights, the step's number and the seed, so a run that was killed and resumed equals one that was not.
Not here: what is minimised (``losses.py``, and who calls this), or which tokens a step reads (``batches.py``).
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from assay.ops.train import state as states
from assay.ops.train.batches import seed_of

B = TypeVar("B")
SLACK_NATS = 0.1  # a rise by less is no divergence, however low the lowest loss was


class Loss(NamedTuple):
    """The sum of a loss over tokens, with its gradient, and how many tokens these are."""

    total: Tensor
    tokens: int


class Settings(NamedTuple):
    """How a run is optimized. Steps are updates of the weights."""

    steps: int
    learning_rate: float  # the highest, reached after the warm-up
    warmup_steps: int = 0
    final_share: float = 0.1  # of the highest rate, in the last step
    weight_decay: float = 0.01  # of matrices; norms and biases have none
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = 1e-8
    clip: float = 1.0  # the largest norm of the gradient of the mean loss; longer ones are scaled to it
    record_every: int = 10  # steps
    evaluate_every: int = 100  # steps; a multiple of record_every
    save_seconds: float = 120.0  # between states
    seed: int = 0
    stop_above: float | None = (
        None  # times the lowest loss of the curve so far: a point above it, after the warm-up, ends the run; never when None
    )


class Point(NamedTuple):
    """The curve at one step: tokens so far, the loss (nats a token, the mean since the point before), and what an evaluation found.

    ``loss`` and ``gradient_norm`` are None at step 0, before anything is trained.
    """

    step: int
    tokens: int
    loss: float | None
    learning_rate: float
    gradient_norm: float | None
    metrics: dict[str, float]


class Progress(NamedTuple):
    """Where a run is, after each step. ``tokens_s`` is of this process, training alone."""

    step: int
    steps: int
    tokens: int
    loss: float
    tokens_s: float
    seconds_left: float


class DivergedError(ValueError):
    """A loss or a gradient that is not finite, or a loss that rose too far."""


def learning_rate(step: int, settings: Settings) -> float:
    """The rate of a step, counted from 0: a straight rise over the warm-up, then half a cosine down to ``final_share``."""
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    done = (step - settings.warmup_steps) / max(1, settings.steps - 1 - settings.warmup_steps)
    return settings.learning_rate * (settings.final_share + (1 - settings.final_share) * 0.5 * (1 + math.cos(math.pi * done)))


def train(
    model: nn.Module,
    batches: Callable[[int], Sequence[B]],
    objective: Callable[[B], Loss],
    settings: Settings,
    *,
    zeros: Mapping[str, Tensor] | None = None,
    rates: Mapping[str, float] | None = None,
    curve: list[Point] | None = None,
    evaluate: Callable[[], Mapping[str, float]] | None = None,
    state: Path | None = None,
    run: Mapping[str, Any] | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> list[Point]:
    """Train the parameters of ``model`` that require a gradient, in place.

    The loss of a step is the sum over all its parts by the number of all their tokens, however unevenly the parts are filled.

    Args:
        batches: the parts of a step, by its number from 0; their gradients are added up. It may use the model (samples of the student), and the
            global random state, which is seeded before each step and put back after it.
        objective: of one part.
        zeros: by the name of a trained parameter, True where it is zero and stays so: neither its gradient, which counts for no norm, nor decay or
            moments move it.
        rates: by the beginning of a parameter's name, its multiple of the learning rate; such parameters do not decay.
        curve: a list that the curve is kept in while it grows, for ``batches`` that go by what evaluations found.
        evaluate: metrics of the model as it is; called before the first step, every ``evaluate_every`` steps, and after the last.
        state: a directory in which states are kept; when there is one, the run goes on from it, whatever weights ``model`` came with.
        run: what else the run is (JSON): a state that was saved with something else is refused.
        progress: called after each step.
    Returns:
        The curve, the first point before any training; the model is left in evaluation mode.
    Raises:
        DivergedError: a loss or gradient is not finite, or ``settings.stop_above`` was passed; says at which step, and what would help. The last
            state stays.
        ValueError: nothing is trained, a trained weight is not float32, weights in ``zeros`` that are not zero, impossible settings, a part without
            tokens in all of a step, or a state of another run.
    """
    _check(settings)
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    _check_parameters(model, parameters)
    masks = _masks(parameters, zeros or {})
    optimizer = _optimizer(parameters, settings, rates or {})
    identity = {"settings": settings._replace(save_seconds=0.0)._asdict(), **(run or {})}
    device = next(iter(parameters.values())).device
    begin, tokens, points = 0, 0, [] if curve is None else curve
    held = [0.0, 0]  # the sum of losses since the last point, and its tokens
    found = states.load(state, expected=identity, shapes={name: parameter.shape for name, parameter in parameters.items()})
    if found is not None:
        begin, tokens, held = found.facts["step"], found.facts["tokens"], list(found.facts["held"])
        points[:] = [Point(**point) for point in found.facts["points"]]
        _restore(parameters, optimizer, found.tensors, begin)
    else:
        points.append(Point(0, 0, None, learning_rate(0, settings), None, _evaluated(model, evaluate)))
    started, saved, spent, seen = time.monotonic(), time.monotonic(), 0.0, 0
    for step in range(begin, settings.steps):
        started = time.monotonic()
        rate = learning_rate(step, settings)
        for group in optimizer.param_groups:
            group["lr"] = rate * group["multiple"]
        model.train()
        with _seeded(seed_of(settings.seed, "step", step), device):
            total, count = _accumulate(batches(step), objective)
        for parameter, mask in masks:
            if parameter.grad is not None:
                parameter.grad.masked_fill_(mask, 0)
        norm = _scale_gradients(parameters.values(), count, settings.clip) if count else math.nan
        last = held[0] / held[1] if held[1] else next((point.loss for point in reversed(points) if point.loss is not None), None)
        _require_finite(total, norm, count, step, rate, last, settings)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        _keep_zero(masks)
        tokens, held = tokens + count, [held[0] + total, held[1] + count]
        spent, seen, done = spent + time.monotonic() - started, seen + count, step + 1
        if done % settings.record_every == 0 or done == settings.steps:
            due = done % settings.evaluate_every == 0 or done == settings.steps
            points.append(Point(done, tokens, held[0] / held[1], rate, norm, _evaluated(model, evaluate) if due else {}))
            held = [0.0, 0]
            _require_low(points, settings)
        if state is not None and done < settings.steps and time.monotonic() - saved >= settings.save_seconds:
            facts = {"run": identity, "step": done, "tokens": tokens, "held": held, "points": [point._asdict() for point in points]}
            states.save(state, done, _state_of(parameters, optimizer), facts)
            saved = time.monotonic()
        if progress is not None:
            progress(Progress(done, settings.steps, tokens, total / count, seen / spent, (settings.steps - done) * spent / (done - begin)))
    model.eval()
    assert not any(parameter.detach()[mask].any() for parameter, mask in masks)
    return points


def _check(settings: Settings) -> None:
    if settings.steps < 1 or not 0 <= settings.warmup_steps < settings.steps:
        raise ValueError(
            f"{settings.steps} steps with a warm-up of {settings.warmup_steps}; at least one step, and a shorter warm-up, was expected"
        )
    if not (0 < settings.learning_rate < math.inf and 0 < settings.clip < math.inf):
        raise ValueError(f"learning_rate={settings.learning_rate} and clip={settings.clip}; finite numbers above 0 were expected")
    if settings.stop_above is not None and not settings.stop_above > 1:
        raise ValueError(f"stop_above={settings.stop_above} times the lowest loss; a factor above 1 was expected, or none")
    if settings.record_every < 1 or settings.evaluate_every % settings.record_every:
        raise ValueError(
            f"evaluate_every={settings.evaluate_every} is no multiple of record_every={settings.record_every}, so evaluations would fall between points"
        )


def _check_parameters(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    if not parameters:
        raise ValueError(f"no parameter of {type(model).__name__} requires a gradient, so there is nothing to train")
    narrow = next((name for name, parameter in parameters.items() if parameter.dtype != torch.float32), None)
    if narrow is not None:
        raise ValueError(
            f"{narrow} is {parameters[narrow].dtype}, in which small updates are rounded away; train float32 weights and save them in another dtype after"
        )


def _masks(parameters: Mapping[str, nn.Parameter], zeros: Mapping[str, Tensor]) -> list[tuple[nn.Parameter, Tensor]]:
    """Each trained parameter that has weights to stay zero, and where they are."""
    for name, mask in zeros.items():
        if name not in parameters:
            raise ValueError(
                f"zeros are to stay in {name}, which is not trained here; names of trained parameters were expected, such as {next(iter(parameters))}"
            )
        if mask.dtype != torch.bool or mask.shape != parameters[name].shape:
            raise ValueError(
                f"the zeros of {name} are {mask.dtype} {list(mask.shape)}; a bool for each of its {list(parameters[name].shape)} weights was expected"
            )
        others = int((parameters[name].detach()[mask.to(parameters[name].device)] != 0).sum())
        if others:
            raise ValueError(f"{others:,} of the {int(mask.sum()):,} weights of {name} that are to stay zero are not zero; prune it first")
    return [(parameters[name], mask.to(parameters[name].device)) for name, mask in zeros.items()]


@torch.no_grad()
def _keep_zero(masks: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
    for parameter, mask in masks:
        parameter.masked_fill_(mask, 0)


def _optimizer(parameters: Mapping[str, nn.Parameter], settings: Settings, rates: Mapping[str, float]) -> torch.optim.AdamW:
    groups = [
        {"params": [], "weight_decay": settings.weight_decay, "multiple": 1.0},
        {"params": [], "weight_decay": 0.0, "multiple": 1.0},
        *({"params": [], "weight_decay": 0.0, "multiple": multiple} for multiple in rates.values()),
    ]
    for name, parameter in parameters.items():
        own = next((number for number, prefix in enumerate(rates) if name.startswith(prefix)), None)
        groups[int(parameter.ndim < 2) if own is None else 2 + own]["params"].append(parameter)
    kept = [group for group in groups if group["params"]]
    return torch.optim.AdamW(kept, lr=settings.learning_rate, betas=settings.betas, eps=settings.epsilon, fused=True)


def _accumulate(parts: Sequence[B], objective: Callable[[B], Loss]) -> tuple[float, int]:
    """Add the gradients of the sums of all parts up; their loss and their tokens."""
    total, tokens = 0.0, 0
    for part in parts:
        loss = objective(part)
        if loss.tokens:
            loss.total.backward()
            total, tokens = total + float(loss.total.detach()), tokens + loss.tokens
    return total, tokens


def _scale_gradients(parameters: Any, tokens: int, clip: float) -> float:
    """Gradients of a sum become those of the mean, and no longer than ``clip``; the norm that the mean's had."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = float(torch.nn.utils.get_total_norm(gradients)) / tokens
    scale = min(1.0, clip / norm if norm else 1.0) / tokens
    for gradient in gradients:
        gradient.mul_(scale)
    return norm


def _require_finite(total: float, norm: float, tokens: int, step: int, rate: float, last: float | None, settings: Settings) -> None:
    if not tokens:
        raise ValueError(f"step {step + 1} has no token to learn from; every row of it is padding")
    if math.isfinite(total) and math.isfinite(norm):
        return
    what = f"the loss is {total / tokens}" if not math.isfinite(total) else f"the loss is {total / tokens:.4g} and its gradient {norm}"
    before = "in the first step" if last is None else f"after a loss of {last:.4g}"
    raise DivergedError(
        f"training diverged at step {step + 1} of {settings.steps}: {what}, {before}, at a learning rate of {rate:.3g}; finite numbers were expected. "
        f"A lower learning rate than {settings.learning_rate:.3g}, a longer warm-up than {settings.warmup_steps} steps, or weights that are finite to "
        "begin with would work"
    )


def _require_low(points: Sequence[Point], settings: Settings) -> None:
    """Refuse to go on when the last point is far above the lowest before it."""
    losses = [point.loss for point in points if point.loss is not None]
    step, lowest = points[-1].step, min(losses)
    if settings.stop_above is None or step <= settings.warmup_steps or losses[-1] <= settings.stop_above * lowest + SLACK_NATS:
        return
    raise DivergedError(
        f"training diverged by step {step} of {settings.steps}: the loss rose to {losses[-1]:.4g} from {lowest:.4g}, and at most {settings.stop_above:g} "
        f"times that was expected. A lower learning rate than {settings.learning_rate:.3g}, or a longer warm-up than {settings.warmup_steps} steps, "
        "would work"
    )


def _evaluated(model: nn.Module, evaluate: Callable[[], Mapping[str, float]] | None) -> dict[str, float]:
    if evaluate is None:
        return {}
    model.eval()
    with torch.no_grad():
        return {name: float(value) for name, value in evaluate().items()}


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """The global random state (dropout draws from it) seeded inside and put back after."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def _state_of(parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.AdamW) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        moments = optimizer.state.get(parameter) or {}
        first, second = (moments[key] if key in moments else torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq"))
        parts = (parameter, first, second)
        found |= {f"{part}.{name}": tensor for part, tensor in zip(states.PARTS, parts, strict=True)}
    return found


@torch.no_grad()
def _restore(parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.AdamW, tensors: Mapping[str, Tensor], step: int) -> None:
    for name, parameter in parameters.items():
        weight, first, second = (tensors[f"{part}.{name}"].to(parameter.device) for part in states.PARTS)
        parameter.copy_(weight)
        optimizer.state[parameter] = {
            "step": torch.tensor(float(step), dtype=torch.float32, device=parameter.device),
            "exp_avg": first,
            "exp_avg_sq": second,
        }
