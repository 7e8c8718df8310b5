"""The walk through a model that calibration needs: block after block, each on all windows, with what its weights read, before they are changed.

Every calibrated method uses it. Not here: what is made of the inputs (``hessian.py`` and the methods), or how a weight is changed.
"""

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from assay.ops.models import experts, structure

Group = tuple[str, ...]  # names of weights that read one input
Taken = dict[Group, Tensor]  # what each group reads in one batch: real tokens [tokens, in]
TRACED = 8  # tokens of the forward that shows which weights read one input


class Call(NamedTuple):
    """A module as its block calls it on one batch of windows. ``real`` [windows, length] is False at padding, None if there is none."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    real: Bool[Tensor, "windows length"] | None

    def output(self) -> Float[Tensor, "tokens out"]:
        """Run the module with its weights of now: what it gives at the real tokens."""
        with torch.no_grad():
            return _real(_tensor(self.module(*self.args, **self.kwargs)), self.real)


class Stage:
    """Weights that may be changed now: ``groups`` of names that read one input, and ``weights``, name → view [out, in] of the parameter.

    What precedes them in the model has its final weights (with ``propagate``), and nothing that follows has run.
    """

    def __init__(self, block: int, name: str, weights: dict[str, Tensor], groups: Sequence[Group], inputs: Any, calls: Any) -> None:
        self.block, self.name, self.groups = block, name, tuple(groups)
        self.weights = {each: weights[each] for group in groups for each in group}
        self._inputs, self._calls = inputs, calls

    def inputs(self) -> Iterator[tuple[Group, Float[Tensor, "tokens in"]]]:
        """What each group reads, a batch of windows at a time: real tokens only, and for an expert those that are routed to it.

        May be gone through again before a weight is changed. A group without a token in a batch (an expert) is not given for it. The tensors are not to
        be changed; copy what is to outlive the stage.
        """
        for taken in self._inputs():
            yield from ((group, inputs) for group, inputs in taken.items() if len(inputs))

    def calls(self, name: str) -> Iterator[Call]:
        """How the block, run from its start, calls one of its modules, a batch of windows at a time; ``Call.output`` runs that module alone.

        Args:
            name: the full name of a module of this block, such as ``model.layers.3.self_attn``.
        """
        return self._calls(name)


def walk(
    model: PreTrainedModel,
    windows: Int[Tensor, "windows length"],
    *,
    real: Bool[Tensor, "windows length"] | None = None,
    true_sequential: bool = True,
    propagate: bool = True,
    batch: int = 8,
) -> Iterator[Stage]:
    """Go through the blocks; at each stage the caller reads the inputs and may change the stage's weights, then the walk goes on.

    With ``true_sequential`` a block has a stage for each input in the order of the computation (q, k and v; o; gate and up; down), so that a weight sees
    what the changed weights before it give. Each batch then runs through a block once, and waits at each stage for the others. Without it a block is one
    stage, whose groups all see the block as it was; norms may then be changed too. A second run makes the input of the next block.

    Args:
        windows: token ids.
        real: False at padding, which enters nothing. All tokens count when None.
        propagate: the next block sees the outputs of the changed block; otherwise those that the block gave before, at the cost of one more run.
        batch: windows a forward. The hidden states of all windows are kept, and with ``true_sequential`` what waits at the widest layer too.
    Raises:
        ValueError: no window, a window without a real token, or a model in training mode.
    """
    _check(model, windows, real)
    path, blocks = structure.blocks_path(model), structure.blocks(model)
    weights, mixtures = experts.weights(model), experts.fused(model)
    order = _order(model, windows, mixtures)
    batches = _enter(model, windows, real, batch)
    for index, block in enumerate(blocks):
        name = f"{path}.{index}"
        calls = _calls_of(model, block, index, batches)
        steps = [step for step in order if step[0].startswith(f"{name}.")]
        original = None if propagate else [_run(block, each, index) for each in batches]
        if true_sequential:
            lanes = [_Lane(partial(_run, block, each, index), each.real) for each in batches]
            with closing(_relay(model, mixtures, steps, lanes)) as relay:
                for groups, inputs in relay:
                    yield Stage(index, name, weights, groups, inputs, calls)
            outputs = [lane.output for lane in lanes]
        else:
            groups = [group for step in steps for groups in _stages(step, mixtures) for group in groups]
            yield Stage(index, name, weights, groups, _runner(model, mixtures, steps, block, index, batches), calls)
            outputs = [_run(block, each, index) for each in batches] if propagate else []
        for each, output in zip(batches, original or outputs, strict=True):
            each.hidden = output


class _Batch:
    """Some windows: their hidden states before the next block, and the arguments with which the model calls each block."""

    def __init__(self, real: Tensor | None) -> None:
        self.real = real
        self.hidden = torch.empty(0)
        self.arguments: list[tuple[tuple[Any, ...], dict[str, Any]]] = []


def _check(model: PreTrainedModel, windows: Tensor, real: Tensor | None) -> None:
    if not windows.numel():
        raise ValueError(f"windows has shape {list(windows.shape)}; calibration needs at least one window of one token")
    if real is not None and not real.any(dim=1).all():
        raise ValueError("a window has no real token; leave it out")
    if model.training:
        raise ValueError(f"{type(model).__name__} is in training mode, where dropout may change its hidden states; call model.eval() first")


@torch.no_grad()
def _order(model: PreTrainedModel, windows: Tensor, mixtures: dict[str, nn.Module]) -> list[Group]:
    """What the blocks compute, in order, from a forward over a few tokens: names of linear layers that read one tensor, or of one mixture."""
    groups: list[list[str]] = []
    seen: dict[tuple[Any, ...], tuple[Tensor, list[str]]] = {}  # the tensor is kept, so that no other takes its place in memory

    def note(name: str, args: tuple[Any, ...]) -> None:
        read = args[0]
        key = (read.data_ptr(), read.shape, name in mixtures and name)
        if key not in seen:
            seen[key] = read, []
            groups.append(seen[key][1])
        seen[key][1].append(name)

    watched = [*structure.block_linears(model), *mixtures]
    with _hooks({name: lambda _, args, __, name=name: note(name, args) for name in watched}, model):
        model.base_model(input_ids=windows[:1, :TRACED].to(model.device), use_cache=False)
    return [tuple(group) for group in groups]


@torch.no_grad()
def _enter(model: PreTrainedModel, windows: Tensor, real: Tensor | None, batch: int) -> list[_Batch]:
    """The hidden states that enter the first block, and what else each block is called with: the model runs with blocks that only note this."""
    batches = []
    for at in range(0, len(windows), batch):
        ids, each, arguments = windows[at : at + batch].to(model.device), _Batch(None), {}
        if real is not None:
            each.real = real[at : at + batch].to(model.device)
            arguments = {"attention_mask": each.real.long(), "position_ids": (each.real.long().cumsum(dim=1) - 1).clamp(min=0)}

        def note(hidden_states: Tensor, *args: Any, each: _Batch = each, **kwargs: Any) -> Tensor:
            each.hidden = hidden_states
            each.arguments.append((args, kwargs))
            return hidden_states

        blocks = structure.blocks(model)
        for block in blocks:
            block.forward = note
        try:
            model.base_model(input_ids=ids, use_cache=False, **arguments)
        finally:
            for block in blocks:
                del block.forward  # the class's own shows again
        batches.append(each)
    return batches


@torch.no_grad()
def _run(block: nn.Module, each: _Batch, index: int) -> Tensor:
    args, kwargs = each.arguments[index]
    return _tensor(block(each.hidden, *args, **kwargs))


def _runner(
    model: PreTrainedModel, mixtures: dict[str, nn.Module], steps: list[Group], block: nn.Module, index: int, batches: list[_Batch]
) -> Callable[[], Iterator[Taken]]:
    """Inputs of a whole block: it runs on one batch after the other."""

    def inputs() -> Iterator[Taken]:
        for each in batches:
            taken: Taken = {}
            with _hooks(_takers(mixtures, steps, lambda _, found, taken=taken: taken.update(found), lambda each=each: each.real), model):
                _run(block, each, index)
            yield taken

    return inputs


def _relay(
    model: PreTrainedModel, mixtures: dict[str, nn.Module], steps: list[Group], lanes: list["_Lane"]
) -> Generator[tuple[list[Group], Callable[[], Iterator[Taken]]], None, None]:
    """All lanes to one stage after the other; the groups of each, and what waits there."""

    def stop(stage: list[Group], taken: Taken) -> None:
        lane = _Lane.here()
        if lane is not None:  # none: the block is run for another purpose
            lane.stop(stage, taken)

    def real() -> Tensor | None:
        lane = _Lane.here()
        return lane.real if lane else None

    try:
        with _hooks(_takers(mixtures, steps, stop, real), model):
            for stage in [groups for step in steps for groups in _stages(step, mixtures)]:
                for lane in lanes:
                    lane.advance()
                    if lane.at != stage:
                        raise ValueError(
                            f"a batch of windows reaches {lane.at} where {stage} was expected; blocks that run alike for any text work"
                        )
                yield stage, lambda: (lane.taken for lane in lanes)
            for lane in lanes:
                lane.advance()
    finally:
        for lane in lanes:
            lane.close()


def _stages(step: Group, mixtures: dict[str, nn.Module]) -> list[list[Group]]:
    """The stages that a step of the computation is: a mixture is two, each with a group an expert."""
    if step[0] not in mixtures:
        return [[step]]
    every = [f"{step[0]}.{expert}" for expert in range(experts.count(mixtures[step[0]]))]
    return [[(f"{each}.gate_proj", f"{each}.up_proj") for each in every], [(f"{each}.down_proj",) for each in every]]


def _takers(
    mixtures: dict[str, nn.Module], steps: list[Group], give: Callable[[list[Group], Taken], None], real: Callable[[], Tensor | None]
) -> dict[str, Callable[..., None]]:
    """A pre-hook for the first layer of each step, which gives the stage its inputs (an expert's ``down_proj`` after its gate may have changed)."""

    def linear(stage: list[Group], args: tuple[Any, ...]) -> None:
        give(stage, {stage[0]: _real(args[0], real())})

    def mixture(module: nn.Module, stages: list[list[Group]], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden, chosen = [*args, *kwargs.values()][:2]
        mask = real()
        hidden, chosen = _real(hidden, mask), _real(chosen, mask)
        taken = {group: hidden[experts.routed(chosen, expert)] for expert, group in enumerate(stages[0])}
        give(stages[0], taken)
        give(stages[1], {stages[1][expert]: experts.inner(module, expert, read) for expert, read in enumerate(taken.values())})

    found: dict[str, Callable[..., None]] = {}
    for step in steps:
        stages = _stages(step, mixtures)
        if step[0] in mixtures:
            found[step[0]] = lambda module, args, kwargs, stages=stages: mixture(module, stages, args, kwargs)
        else:
            found[step[0]] = lambda _, args, __, stages=stages: linear(stages[0], args)
    return found


def _calls_of(model: PreTrainedModel, block: nn.Module, index: int, batches: list[_Batch]) -> Callable[[str], Iterator[Call]]:
    def calls(name: str) -> Iterator[Call]:
        for each in batches:
            found: list[Call] = []

            def take(module: nn.Module, args: Any, kwargs: Any, each: _Batch = each, found: list[Call] = found) -> None:
                found.append(Call(module, args, kwargs, each.real))
                raise _EarlyStop

            try:
                with _hooks({name: take}, model):
                    _run(block, each, index)
            except _EarlyStop:
                yield found[0]
            else:
                raise ValueError(f"block {index} does not call {name}; one of its own modules was expected")

    return calls


class _EarlyStop(BaseException):
    """Ends a forward of which enough has been seen."""


class _Lane:
    """One batch's run in a thread of its own: it stops where a hook says so, keeps all it has computed, and goes on when told. One runs at a time."""

    _local = threading.local()

    def __init__(self, work: Callable[[], Tensor], real: Tensor | None) -> None:
        self.real, self.at, self.taken = real, [], {}
        self.output = torch.empty(0)
        self._work, self._error, self._closed = work, None, False
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._live, daemon=True)
        self._thread.start()

    @classmethod
    def here(cls) -> "_Lane | None":
        """The lane whose thread this is."""
        return getattr(cls._local, "lane", None)

    def advance(self) -> None:
        """Let it run to its next stop, or to its end."""
        self.taken = {}
        self._go.release()
        self._stopped.acquire()
        if self._error is not None:
            raise self._error

    def stop(self, at: list[Group], taken: Taken) -> None:
        """Called in its thread: wait here until told to go on."""
        self.at, self.taken = at, taken
        self._stopped.release()
        self._go.acquire()
        if self._closed:
            raise _EarlyStop

    def close(self) -> None:
        """End it wherever it is."""
        self._closed = True
        self._go.release()
        self._thread.join()

    def _live(self) -> None:
        self._local.lane = self
        self._go.acquire()
        if self._closed:
            return
        torch.set_num_threads(torch.get_num_threads())  # a new thread would begin with as many as there are cores
        try:
            self.output = self._work()
        except _EarlyStop:
            return
        except BaseException as error:
            self._error = error
        self.at = []
        self._stopped.release()


@contextmanager
def _hooks(hooks: dict[str, Callable[..., None]], model: PreTrainedModel) -> Iterator[None]:
    handles = [model.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True) for name, hook in hooks.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _real(tensor: Tensor, real: Tensor | None) -> Tensor:
    """[tokens, width] of a tensor that has windows and positions first, or both in one."""
    flat = tensor.reshape(-1, tensor.shape[-1])
    return flat if real is None else flat[real.flatten()]


def _tensor(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]
