"""The experiment that would settle an advice: its best candidates of which something is not measured, as a file like any other. Not here: running it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from assay.assets.advise import Advice, Candidate
from assay.assets.workspace import Workspace
from assay.schemas.experiment import Experiment
from assay.schemas.graph import draft_variant
from assay.schemas.load import parse_experiment
from assay.schemas.protocols import Protocol
from assay.schemas.spec import Spec
from assay.schemas.steps import Draft, Step

MOST = 8  # candidates in one file
LONGEST_NAME = 48


def settle_file(workspace: Workspace, advice: Advice, file: Path) -> str:
    """The text of an experiment to be written to ``file``: an axis of the candidates that lack a measurement, measured as their own experiment measures
    divergence, and timed at the context and the batch that were asked for.

    Raises:
        ValueError: nothing is missing, or (as an ExperimentError) what came out is no experiment.
    """
    wanting = [each for each in [*advice.ranked, *advice.unknown] if each.missing and each.variant.steps][:MOST]
    if not wanting:
        raise ValueError("nothing is missing: every variant that was ranked has been measured; there is no experiment to write")
    options: dict[str, list[dict[str, Any]]] = {"none": []}
    for each in wanting:
        _add(options, each.experiment, each.variant.options, each.variant.steps)
    asked, own = advice.asked, wanting[0].experiment
    drafts = any(step["kind"] == "draft" for steps in options.values() for step in steps)
    measure = [_measured(own, suite) for suite in ("divergence", "bytes", *(("acceptance",) if drafts else ()))]
    speed = {
        "suite": "speed",
        "batch": 1 if drafts else asked.batch,
        "prompt_tokens": max(4, asked.context),
        "prefill_tokens": max(4, asked.context),
    }
    text = next((protocol.text for protocol in own.protocols.values() if protocol.suite == "speed"), None)
    measure.append({**speed, "name": "speed_as_asked", **({"text": dump(text, own.file.parent)} if text else {})})
    told: dict[str, Any] = {
        "name": file.stem,
        "question": f"Which of these serves {asked.goal} at {asked.context:,} tokens of context and {asked.batch} texts, and what does each cost?",
        "base": _base(wanting[0], workspace),
        "axes": {"candidate": options},
        "measure": measure,
    }
    if asked.at_most_kl is not None:
        told["budgets"] = [{"metric": "kl_mean_nats", "at_most": asked.at_most_kl}]
    lacking = "\n".join(f"#   {each.name}: {', '.join(each.missing)}" for each in wanting)
    body = yaml.safe_dump(told, sort_keys=False, allow_unicode=True, width=150, default_flow_style=None)
    single = "# Timed with one text, since a draft speculates for one.\n" if drafts and asked.batch > 1 else ""
    text = f"# What was not known when this was asked for:\n{lacking}\n{single}{body}"
    parse_experiment(text, file, workspace.registries)
    return text


def dump(spec: Spec, directory: Path) -> dict[str, Any]:
    """``spec`` as its file said it; files that it names, which are relative to ``directory``, by their whole path."""
    return _whole_paths(spec.model_dump(mode="json", exclude_unset=True, exclude_none=True), directory)


def _whole_paths(told: Any, directory: Path) -> Any:
    if isinstance(told, list):
        return [_whole_paths(each, directory) for each in told]
    if not isinstance(told, dict):
        return told
    return {
        key: str((directory / Path(value).expanduser()).resolve())
        if key == "path" and isinstance(value, str)
        else _whole_paths(value, directory)
        for key, value in told.items()
    }


def _add(options: dict[str, list[dict[str, Any]]], experiment: Experiment, taken: Sequence[tuple[str, str]], steps: Sequence[Step]) -> str:
    """Put a chain of steps among the options, with the variant that drafts for it, and return how it is called there."""
    told = [dump(step, experiment.file.parent) for step in steps]
    if steps and isinstance(steps[-1], Draft) and steps[-1].variant is not None:
        other = draft_variant(experiment, experiment.variant(dict(taken)))
        assert other is not None
        told[-1]["variant"] = {"candidate": _add(options, experiment, other.options, other.steps)}
    known = next((name for name, others in options.items() if others == told), None)
    if known is not None:
        return known
    empty = {axis: {option for option, its in named.items() if not its} for axis, named in experiment.axes.items()}
    stem = "_".join(option for axis, option in taken if option not in empty[axis])[:LONGEST_NAME].strip("_") or "variant"
    name, count = stem, 1
    while name in options:
        count += 1
        name = f"{stem[: LONGEST_NAME - 4]}_{count}"
    options[name] = told
    return name


def _measured(experiment: Experiment, suite: str) -> Any:
    """The protocol by which ``experiment`` measures ``suite``, so that facts compare, or the one that the registry calls so."""
    found: Mapping[str, Protocol] = {name: each for name, each in experiment.protocols.items() if each.suite == suite}
    if not found:
        return suite
    name, protocol = next(iter(found.items()))
    told = _whole_paths(protocol.model_dump(mode="json", exclude_defaults=True, exclude_none=True), experiment.file.parent)
    return {"suite": suite, **told, **({} if name == suite else {"name": name})}


def _base(candidate: Candidate, workspace: Workspace) -> Any:
    base = candidate.experiment.base
    if base.name in workspace.registries.bases:
        return base.name
    kept = base.model_dump(mode="json", include={"hub", "revision", "path", "package", "dtype"}, exclude_none=True)
    return kept
