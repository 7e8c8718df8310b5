"""An experiment that searches for a shape: the candidates within a budget of weights, each trained for a while, as a file like any other.

Not here: what promises most (``ops/prune/candidates.py``), or running the file.
"""

from pathlib import Path
from textwrap import dedent

from assay.assets.build import Builder
from assay.assets.ledger import Ledger
from assay.assets.workspace import Workspace
from assay.schemas.graph import build_graph
from assay.schemas.load import parse_experiment

WINDOWS, LENGTH = 8, 256  # of the text on which parts are ranked


def search_file(workspace: Workspace, file: Path, base: str, *, parameters: int, best: int, tokens: int) -> str:
    """The text of an experiment to be written to ``file``: the axis ``shape`` has the ``best`` candidates, ``recover`` a distillation of ``tokens`` tokens.

    ``base`` is a name, or {hub: …} or {path: …} as in a file. Imports the base where it is not in the store, and runs it over a few windows.

    Raises:
        ValueError: no shape meets the budget, or the base is one whose widths are not cut.
    """
    import torch

    from assay.ops.data.texts import documents
    from assay.ops.data.tokens import calibration_windows
    from assay.ops.models.dense import load_dense, load_tokenizer
    from assay.ops.prune.candidates import candidates, family_of
    from assay.ops.prune.shapes import DIVISORS

    name = file.stem
    start = parse_experiment(f"name: {name}\nbase: {base}\naxes: {{shape: {{none: []}}}}\nmeasure: [bytes]\n", file, workspace.registries)
    graph = build_graph(start)
    path = Builder(Ledger(workspace, graph)).node(graph.base).path
    model = load_dense(path, dtype=torch.float32)
    windows = calibration_windows(load_tokenizer(path), documents(name="wikipedia_train"), WINDOWS, LENGTH)
    family, config = family_of(model), model.config.get_text_config(decoder=True)
    divisors = DIVISORS._replace(
        hidden=config.num_attention_heads if family.whole_heads else DIVISORS.hidden, ffn=64 if config.intermediate_size >= 1024 else 8
    )
    options = {}
    for number, each in enumerate(candidates(model, windows, parameters, best=best, divisors=divisors), start=1):
        shape = each.shape
        gone = config.num_hidden_layers - shape.layers
        asked = {
            "kv_groups": (shape.kv_groups, config.num_key_value_heads),
            "ffn": (shape.ffn, config.intermediate_size),
            "hidden": (shape.hidden, config.hidden_size),
        }
        widths = ", ".join(f"{key}: {size}" for key, (size, full) in asked.items() if size != full)
        steps = [f"{{kind: prune_depth, layers: {gone}}}"] * bool(gone) + [f"{{kind: prune_width, {widths}}}"] * bool(widths)
        if steps:
            options[f"shape{number}"] = f"[{', '.join(steps)}]  # {each.parameters:,} weights; {each.score:.3f} of the importance"
    head = f"""\
        # Shapes of at most {parameters:,} weights that hold most of the importance of {base}'s parts, each trained toward it on {tokens:,} tokens.
        # The winner: SELECT shape FROM {name} WHERE recover = 'kl' ORDER BY kl_mean_nats LIMIT 1
        name: {name}
        question: Which shape of at most {parameters:,} weights is best after a short recovery?
        base: {base}
        axes:
          shape:
            none: []
    """
    tail = f"""\
          recover:
            none: []
            kl: [{{kind: distill, tokens: {tokens}}}]
        grid: {{include: [{{recover: none}}, {{shape: [{", ".join(options)}], recover: kl}}]}}
        measure:
          - {{suite: divergence, text: {{name: wikipedia}}, tokens: 8192, window: 512}}
          - bytes
          - recovery
          - speed
    """
    return dedent(head).rstrip() + "\n" + "\n".join(f"    {option}: {steps}" for option, steps in options.items()) + "\n" + dedent(tail)
