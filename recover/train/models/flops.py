"""Floating-point operations that a model needs per token."""

from __future__ import annotations

from recover.train.models.llama_config import LlamaConfig


def flops_per_token(shape: LlamaConfig, seq_len: int) -> float:
    """Operations of forward and backward, as papers count them: 6 N + 12 L H D T.

    N    parameters that multiply each token: 2 operations forward, 4 backward for each. Those of the embedding are
         looked up, not multiplied (tied ones multiply at the output); of a mixture's experts `top_k` are visited
    L    layers, H heads of D channels: Q K^T and its product with V are 2 x 2 H D T forward, and twice that backward
    T    tokens in a sequence

    The half of the attention that a causal mask saves is counted; what is computed again in backward is not.
    """
    head = shape.dim // shape.heads
    attention = 2 * shape.dim * head * (shape.heads + shape.kv_heads)
    networks = shape.top_k if shape.experts else 1
    block = attention + 3 * shape.dim * shape.hidden * networks + shape.dim * shape.experts
    multiplied = shape.layers * block + shape.vocab * shape.dim
    return 6.0 * multiplied + 12.0 * shape.layers * shape.heads * head * seq_len
