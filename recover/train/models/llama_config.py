"""The shape of the reference LLaMA, and its sizes. Imports nothing, so that a job is checked without torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LlamaConfig:
    vocab: int = 256
    dim: int = 256
    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    hidden: int = 640
    seq_len: int = 128
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    dropout: float = 0.0
    tied: bool = False
    experts: int = 0  # feed-forward networks per layer that tokens are routed to; 0: one for all
    top_k: int = 2  # experts per token

    def __post_init__(self) -> None:
        if self.dim % self.heads:
            raise ValueError(f"dim {self.dim} is not a multiple of heads {self.heads}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")
        if (self.dim // self.heads) % 2:
            raise ValueError(f"a head of {self.dim // self.heads} is odd; rotary positions need an even one")
        if self.experts and not 1 <= self.top_k <= self.experts:
            raise ValueError(f"top_k is {self.top_k}; it must be 1 to {self.experts}, the number of experts")


SIZES = {
    "tiny": LlamaConfig(),
    "small": LlamaConfig(
        vocab=8192, dim=512, layers=8, heads=8, kv_heads=4, hidden=1408, seq_len=256, tied=True
    ),
    "1b": LlamaConfig(vocab=32_000, dim=2048, layers=18, heads=16, kv_heads=16, hidden=5632, seq_len=4096),
    "7b": LlamaConfig(vocab=32_000, dim=4096, layers=32, heads=32, kv_heads=32, hidden=11_008, seq_len=4096),
}
