"""How many weights and operations a decoder of the Llama family has, from its widths alone. Not here: bytes on disk (``bytes.py``), time (``roofline.py``)."""

from typing import NamedTuple


class Decoder(NamedTuple):
    """The widths of a decoder; counts are numbers of blocks, channels, heads, tokens. ``gated``: the MLP has three matrices, otherwise two."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    gated: bool = True

    @property
    def block_parameters(self) -> int:
        """Weights of the matrices in the blocks: each of them is multiplied once by every token; norms and biases left out."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + (3 if self.gated else 2) * self.hidden * self.intermediate)

    @property
    def head_parameters(self) -> int:
        """Weights of the head, which scores a token's successors; of a tied model they are the embedding's."""
        return self.vocabulary * self.hidden

    @property
    def matmul_parameters(self) -> int:
        """Weights that a decoded token multiplies: blocks and head. A row of the embedding is only copied."""
        return self.block_parameters + self.head_parameters

    @property
    def parameters(self) -> int:
        """All weights of the matrices, the embedding once where it is tied."""
        return self.block_parameters + (1 if self.tied else 2) * self.head_parameters

    @property
    def attention_flops_per_context_token(self) -> int:
        """FLOPs by which a token's forward grows with each token of context: 4 · layers · heads · head_dim, for q·k and the sum of values."""
        return 4 * self.layers * self.heads * self.head_dim


def decode_flops(matmul_parameters: float, attention_flops_per_context_token: float, *, tokens: float, context: float) -> float:
    """FLOPs of one forward over ``tokens`` new tokens (batch · positions), each of which attends to ``context`` tokens: 2 a weight, and attention."""
    return tokens * (2 * matmul_parameters + attention_flops_per_context_token * context)


def prefill_flops(
    block_parameters: float, head_parameters: float, attention_flops_per_context_token: float, *, batch: int, tokens: int
) -> float:
    """FLOPs of reading ``batch`` prompts of ``tokens`` tokens: attention is causal, so a token attends to (tokens + 1) / 2 on average; the head scores
    the last position of each prompt alone."""
    each = 2 * block_parameters + attention_flops_per_context_token * (tokens + 1) / 2
    return batch * (tokens * each + 2 * head_parameters)
