"""What keys and values take in formats that are not ours too, and when reading them outweighs the weights. Not here: what our own cache takes (``bytes.py``)."""

import math
from fractions import Fraction

CONTEXT_128K = 128 * 1024  # tokens


def shared_bits(bits: int, *, group: int, scale_bits: int = 16, zero_bits: int = 16) -> Fraction:
    """Bits of a number that is rounded in groups: its code, and its part of the group's scale and zero point.

    4 bits in groups of 32 with both in 16 bits are 5: a quarter more than the codes, and 3.2 times less than 16 bits, not 4 times.

    Source:
        Liu et al. 2024, KIVI, §4, arXiv:2402.02750.
    """
    if min(bits, group) < 1:
        raise ValueError(f"bits={bits} in groups of {group}; expected 1 or more of both")
    return bits + Fraction(scale_bits + zero_bits, group)


def kv_bytes_at(layers: int, kv_heads: int, head_dim: int, bits: Fraction | float = 16) -> float:
    """Bytes that a token of context takes at ``bits`` a number, all included: 2 · layers · kv_heads · head_dim · bits / 8.

    70B with 8 KV heads: 320 KiB in 16 bits; 8B: 128 KiB. See :func:`assay.ops.cost.bytes.kv_bytes_per_token` for the formats of our cache.
    """
    return float(2 * layers * kv_heads * head_dim * Fraction(bits) / 8)


def mla_bytes_per_token(layers: int, latent: int, rope_dim: int, *, bytes_per_number: float = 2) -> float:
    """Bytes of a token of context in multi-head latent attention: one latent and one rotated key a layer, shared by all heads.

    Source:
        DeepSeek-AI 2024, DeepSeek-V2, §2.1, arXiv:2405.04434.
    """
    return layers * (latent + rope_dim) * bytes_per_number


def kept(kv_bytes: float, share: float) -> float:
    """Bytes after an eviction that keeps ``share`` of the tokens, 0 to 1."""
    if not 0 < share <= 1:
        raise ValueError(f"share={share} of the tokens; expected more than 0 and at most 1")
    return kv_bytes * share


def crossover_context(weight_bytes: float, kv_bytes_per_token: float, *, batch: int = 1) -> float:
    """Tokens of context a text at which a batch reads as many bytes of keys and values as of weights; beyond it a smaller cache brings more."""
    if min(kv_bytes_per_token, batch) <= 0:
        raise ValueError(f"kv_bytes_per_token={kv_bytes_per_token}, batch={batch}; expected both above 0")
    return weight_bytes / (kv_bytes_per_token * batch)


def largest_context(memory_bytes: float, *, weight_bytes: float, kv_bytes_per_token: float, batch: int = 1) -> int:
    """Tokens of context that each text of a batch can have beside the weights; 0 where the weights alone do not fit."""
    return max(0, math.floor(crossover_context(memory_bytes - weight_bytes, kv_bytes_per_token, batch=batch)))
