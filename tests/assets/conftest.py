"""A workspace of a test: a tiny base in a directory, a text beside the experiments, its own home."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from assay.assets.workspace import Workspace

WORDS = "the quick brown fox jumps over 12 lazy dogs, and (then) it runs = away from 345 cats. "

TINY = """
name: tiny
question: Does a tiny model behave like a large one?
base: {path: base, dtype: float32}
axes:
  prune:
    none: []
    depth1: [{kind: prune_depth, layers: 1, calibration: {text: {path: text.txt}, windows: 2, length: 32}}]
  quantize:
    none: []
    int4: [{kind: quantize, format: int4, group_size: 32}]
  draft:
    none: []
    ngram: [{kind: draft, method: ngram, tokens: 3}]
    sibling: [{kind: draft, method: variant, variant: {quantize: int4}, tokens: 2}]
measure:
  - {suite: divergence, text: {path: text.txt}, tokens: 256, window: 64}
  - bytes
  - {suite: acceptance, text: {path: text.txt}, prompts: 2, prompt_tokens: 16, new_tokens: 12}
  - {suite: speed, text: {path: text.txt}, prompt_tokens: 16, prefill_tokens: 32, new_tokens: 6, repeats: 2}
budgets:
  - {metric: kl_mean_nats, at_most: 1.0e-9, for: {quantize: int4}}
"""

SMALL = """
name: small
base: {path: base, dtype: float32}
axes:
  quantize:
    none: []
    int8: [{kind: quantize, format: int8, group_size: 32}]
    int2: [{kind: quantize, format: int2, group_size: 32, symmetric: false}]
measure: [{suite: divergence, text: {path: text.txt}, tokens: 128, window: 64}, bytes]
"""


@pytest.fixture
def place(tmp_path: Path, make_llama: Callable[..., Any], save_checkpoint_dir: Callable[[Any, Path], Path]) -> Path:
    """A directory with a base, a text and two experiments."""
    directory = tmp_path / "experiments"
    directory.mkdir()
    save_checkpoint_dir(make_llama(), directory / "base")
    (directory / "text.txt").write_text(WORDS * 40)
    (directory / "tiny.yaml").write_text(TINY)
    (directory / "small.yaml").write_text(SMALL)
    return directory


@pytest.fixture
def bench(place: Path, tmp_path: Path) -> Workspace:
    return Workspace(tmp_path / "home", (place,))
