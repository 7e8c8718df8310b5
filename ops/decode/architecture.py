"""What a decoder of the Llama family is made of, read from its config alone. Not here: weights (``weights``), or running one (``forward``).

One description covers Llama (SmolLM2), Mistral, Qwen2, Qwen3, Gemma 3 and Mixtral as transformers defines them: what differs between them are numbers
and switches of this file, and nothing else of the engine asks which family it runs.
"""

from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text", "mixtral")
FIXED_ROPE = ("default", "linear", "llama3", "yarn")  # frequencies that do not depend on how long the text is


class Rope(NamedTuple):
    """Rotary embedding: radians a position of each pair of channels, and the factor on cosine and sine."""

    inverse_frequencies: Float[Tensor, " half"]
    factor: float


class Layer(NamedTuple):
    """How one block attends: to ``window`` tokens, the query's own included (None: all before it), with the ``rope``-th embedding."""

    window: int | None
    rope: int


class Architecture(NamedTuple):
    """Widths, switches and constants of one decoder; counts are numbers of heads, channels, tokens."""

    family: str
    layers: tuple[Layer, ...]
    ropes: tuple[Rope, ...]
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    norm_eps: float
    norm_offset: float  # a norm multiplies by offset + weight: 1 for Gemma, 0 for the others
    qk_norm: bool  # each head's query and key are normalised before the rotation
    sandwich: bool  # what attention and MLP give is normalised before it is added
    activation: Literal["silu", "gelu_tanh"]
    attention_scale: float
    embedding_scale: float
    experts: int  # 0: one dense MLP a block
    experts_per_token: int
    tied: bool

    @property
    def group(self) -> int:
        """Query heads a key-value head."""
        return self.heads // self.kv_heads


def require_family(config: dict[str, Any]) -> None:
    """Refuse, by the config's JSON alone, a model that the engine cannot run.

    Raises:
        ValueError: names what it is and what would work.
    """
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise ValueError(
            f"the engine decodes the families {', '.join(FAMILIES)}; this model's model_type is {kind!r}. "
            "Divergence and bytes can be measured of it; speed, acceptance and sampling cannot"
        )


def architecture(config: PreTrainedConfig) -> Architecture:
    """Read ``config`` as transformers does.

    Raises:
        ValueError: another family, a rotary embedding that changes with the length of the text, or a switch that the engine does not know.
    """
    require_family({"model_type": config.model_type})
    gemma = config.model_type == "gemma3_text"
    activation = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
    known: dict[str | None, Literal["silu", "gelu_tanh"]] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
    unknown = {
        "hidden_act": activation if activation not in known else None,
        "mlp_bias": getattr(config, "mlp_bias", False),
        "final_logit_softcapping": getattr(config, "final_logit_softcapping", None),
        "attn_logit_softcapping": getattr(config, "attn_logit_softcapping", None),
        "use_bidirectional_attention": getattr(config, "use_bidirectional_attention", False),
    }
    for name, value in unknown.items():
        if value:
            raise ValueError(
                f"{config.model_type} with {name}={value!r} is not decoded here; a hidden_act of {', '.join(map(str, known))} is, "
                f"without {', '.join(list(unknown)[1:])}"
            )
    layers, ropes = _layers(config)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    scalar = getattr(config, "query_pre_attn_scalar", None) if gemma else None
    experts = getattr(config, "num_local_experts", 0) if config.model_type == "mixtral" else 0
    return Architecture(
        family=config.model_type,
        layers=layers,
        ropes=ropes,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_dim=head_dim,
        intermediate=config.intermediate_size,
        vocabulary=config.vocab_size,
        norm_eps=config.rms_norm_eps,
        norm_offset=1.0 if gemma else 0.0,
        qk_norm=config.model_type in ("qwen3", "gemma3_text"),
        sandwich=gemma,
        activation=known[activation],
        attention_scale=(scalar or head_dim) ** -0.5,
        embedding_scale=config.hidden_size**0.5 if gemma else 1.0,
        experts=experts,
        experts_per_token=config.num_experts_per_tok if experts else 0,
        tied=bool(config.tie_word_embeddings),
    )


def _layers(config: PreTrainedConfig) -> tuple[tuple[Layer, ...], tuple[Rope, ...]]:
    count, window = config.num_hidden_layers, getattr(config, "sliding_window", None)
    kinds: list[str] = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * count
    foreign = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if foreign:
        raise ValueError(f"layers of the type {', '.join(foreign)} are not decoded here; full_attention and sliding_attention are")
    parameters: dict[str, Any] = config.rope_parameters or {}
    by_kind: dict[str, Any] = {kind: parameters[kind] for kind in kinds if kind in parameters} or dict.fromkeys(kinds, parameters)
    order = list(dict.fromkeys(kinds))
    ropes = tuple(_rope(config, kind, by_kind[kind]) for kind in order)
    layers = tuple(Layer(window if kind == "sliding_attention" else None, order.index(kind)) for kind in kinds)
    return layers, ropes


def _rope(config: PreTrainedConfig, kind: str, parameters: dict[str, Any]) -> Rope:
    name = parameters.get("rope_type", "default")
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if name not in FIXED_ROPE:
        raise ValueError(f"the rotary embedding {name!r} changes with the length of a text; the engine decodes {', '.join(FIXED_ROPE)}")
    if name == "default":
        exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
        return Rope(1.0 / (parameters["rope_theta"] ** exponents), 1.0)
    nested = kind in config.rope_parameters
    frequencies, factor = ROPE_INIT_FUNCTIONS[name](config, torch.device("cpu"), **({"layer_type": kind} if nested else {}))
    if 2 * len(frequencies) != width:
        raise ValueError(
            f"a rotary embedding of {2 * len(frequencies)} of the {width} channels of a head is not decoded here; one of all is"
        )
    return Rope(frequencies.float(), float(factor))
