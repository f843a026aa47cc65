"""The reference LLaMA: RMSNorm, rotary positions, grouped-query attention by SDPA, SwiGLU, or experts instead of it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from recover.train.models.experts import Experts
from recover.train.models.llama_config import LlamaConfig


def rotary(seq_len: int, head: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of the angles by which each pair of channels is turned at each position."""
    frequencies = theta ** (-torch.arange(0, head, 2).float() / head)
    angles = torch.outer(torch.arange(seq_len).float(), frequencies)
    return angles.cos(), angles.sin()


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    left, right = x.float().chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, left * sin + right * cos), dim=-1).type_as(x)


class Attention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head = config.dim // config.heads
        self.wq = nn.Linear(config.dim, config.heads * self.head, bias=False)
        self.wk = nn.Linear(config.dim, config.kv_heads * self.head, bias=False)
        self.wv = nn.Linear(config.dim, config.kv_heads * self.head, bias=False)
        self.wo = nn.Linear(config.heads * self.head, config.dim, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        # Head counts follow from the weights, so that a module split over ranks needs no other forward.
        query, key, value = (
            layer(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for layer in (self.wq, self.wk, self.wv)
        )
        attended = F.scaled_dot_product_attention(
            turn(query, cos, sin), turn(key, cos, sin), value, is_causal=True, enable_gqa=True
        )
        return self.wo(attended.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.hidden, bias=False)
        self.w2 = nn.Linear(config.hidden, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.feed_forward: nn.Module = (
            Experts(config.experts, config.top_k, config.dim, config.hidden)
            if config.experts
            else FeedForward(config)
        )
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.feed_forward_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), cos, sin))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


class Llama(nn.Module):
    """Tokens in, logits out; with targets, the mean cross-entropy."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab, bias=False)
        cos, sin = rotary(config.seq_len, config.dim // config.heads, config.rope_theta)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._initialise()
        if config.tied:
            self.output.weight = self.embedding.weight

    def _initialise(self) -> None:
        """Small normal weights; what adds to the residual stream is smaller the deeper the model is."""
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                residual = name.endswith(("wo.weight", "w2.weight", "feed_forward.w2"))
                nn.init.normal_(parameter, std=0.02 / (2 * self.config.layers) ** (0.5 * residual))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        length = tokens.shape[1]
        if length > self.config.seq_len:
            raise ValueError(
                f"a sequence of {length} tokens is longer than the model's seq_len {self.config.seq_len}"
            )
        x = self.embedding(tokens)
        cos, sin = self.cos[:length], self.sin[:length]
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = self.output(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
