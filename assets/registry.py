"""What names stand for: bases, protocols, texts, experiments, read from YAML files and from what is installed. Loads no model."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from assay.schemas.base import Base, Shape
from assay.schemas.load import Registries
from assay.schemas.protocols import Protocol

HERE = Path(__file__).parent
TEXTS = frozenset({"wikipedia", "wikipedia_train", "essays", "mathematics", "python_code"})


def load_registries() -> Registries:
    """The bases of ``bases.yaml`` and the protocols of ``protocols.yaml``, beside the texts that ``ops/data`` reads."""
    bases = {name: Base.model_validate_json(json.dumps({"name": name, **entry})) for name, entry in _entries("bases.yaml")}
    adapter: TypeAdapter[Protocol] = TypeAdapter(Protocol)
    protocols = {name: adapter.validate_json(json.dumps(entry)) for name, entry in _entries("protocols.yaml")}
    return Registries(bases, protocols, TEXTS, shape_of=shape_of, reserved=taken_names())


def taken_names() -> frozenset[str]:
    """The tables and views of the warehouse: an experiment becomes a view and cannot have such a name."""
    files = (HERE.parent / "warehouse").glob("*/*.sql")
    return frozenset({"metric", *(file.stem for file in files if file.parent.name in ("tables", "views"))})


def find_experiments(places: Iterable[Path]) -> dict[str, Path]:
    """Experiment files by their file name, in the directories and files of ``places``; the first of a name wins. A place that is not there holds none."""
    found: dict[str, Path] = {}
    for place in places:
        for file in sorted(place.glob("*.yaml")) if place.is_dir() else [place] if place.is_file() else []:
            found.setdefault(file.stem, file)
    return found


def shape_of(base: Base) -> Shape | None:
    """The widths of a base: as stated, from the config.json of a directory, or from a hub file that is already on this machine."""
    if base.shape is not None:
        return base.shape
    if base.path:
        return shape_from_config(json.loads((Path(base.path) / "config.json").read_text()))
    if base.hub:
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(base.hub, "config.json", revision=base.revision)
        return shape_from_config(json.loads(Path(cached).read_text())) if isinstance(cached, str) else None
    return None


def shape_from_config(config: dict[str, Any]) -> Shape | None:
    """A transformers config as a :class:`Shape`; None where it has other words for its widths."""
    config = config.get("text_config", config)
    try:
        heads = config["num_attention_heads"]
        return Shape(
            layers=config["num_hidden_layers"], hidden_size=config["hidden_size"], intermediate_size=config["intermediate_size"], heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads, head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            vocab_size=config["vocab_size"], tied=config.get("tie_word_embeddings", str(config.get("model_type", "")).startswith("gemma")),
        )  # fmt: skip
    except (KeyError, ValidationError):
        return None


def _entries(name: str) -> Iterable[tuple[str, dict[str, Any]]]:
    return yaml.safe_load((HERE / name).read_text()).items()
