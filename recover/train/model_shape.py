"""The shape of the LLaMA that a configuration names."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from recover.job.config_keys import ConfigError
from recover.train.config import Config
from recover.train.models import SIZES, LlamaConfig


def shape_of(config: Config, vocab: int) -> LlamaConfig:
    """A named size takes the vocabulary of the tokenizer; a model from a file keeps its own."""
    if config.model in SIZES:
        shape = dataclasses.replace(SIZES[config.model], vocab=vocab, seq_len=config.seq_len)
    else:
        shape = _from_hugging_face(Path(config.model))
    shape = dataclasses.replace(shape, experts=config.experts, top_k=config.top_k)
    if config.parallel == "3d":
        from recover.parallel.partition import ModelCut

        ModelCut(config.tp, config.pp, config.ep, config.schedule).check_model(shape)
    if config.seq_len > shape.seq_len:
        raise ConfigError(
            f"seq_len={config.seq_len} is more than the {shape.seq_len} positions of {config.model}; lower it"
        )
    if vocab > shape.vocab:
        raise ConfigError(
            f"the tokenizer has {vocab} ids and {config.model} only {shape.vocab}; use the tokenizer that belongs to it"
        )
    return shape


def parameters_of(shape: LlamaConfig) -> int:
    head = shape.dim // shape.heads
    attention = 2 * shape.dim * head * (shape.heads + shape.kv_heads)
    block = attention + 3 * shape.dim * shape.hidden * max(1, shape.experts) + (2 + shape.experts) * shape.dim
    embeddings = shape.vocab * shape.dim * (1 if shape.tied else 2)
    return shape.layers * block + embeddings + shape.dim


def _from_hugging_face(path: Path) -> LlamaConfig:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        if found.get("model_type") != "llama":
            raise ValueError(f"its model_type is {found.get('model_type')!r}, not 'llama'")
        heads, dim = found["num_attention_heads"], found["hidden_size"]
        rope = found.get("rope_parameters") or {}
        unsupported = {
            "rope scaling": found.get("rope_scaling") or rope.get("rope_type", "default") != "default",
            "biases": found.get("attention_bias") or found.get("mlp_bias"),
            "an activation other than silu": found.get("hidden_act", "silu") != "silu",
            "heads of another size than hidden_size / heads": found.get("head_dim")
            not in (None, dim // heads),
        }
        if wrong := [name for name, there in unsupported.items() if there]:
            raise ValueError(f"it asks for {', '.join(wrong)}, which the reference LLaMA does not have")
        return LlamaConfig(
            vocab=found["vocab_size"],
            dim=dim,
            layers=found["num_hidden_layers"],
            heads=heads,
            kv_heads=found.get("num_key_value_heads") or heads,
            hidden=found["intermediate_size"],
            seq_len=found.get("max_position_embeddings", 2048),
            rope_theta=found.get("rope_theta") or rope.get("rope_theta") or 10_000.0,
            norm_eps=found.get("rms_norm_eps", 1e-6),
            tied=found.get("tie_word_embeddings", False),
        )
    except KeyError as error:
        raise ConfigError(
            f"model={str(path)!r} lacks {error}; it must be the config.json of a LLaMA"
        ) from None
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"model={str(path)!r} cannot be used: {error}") from None
