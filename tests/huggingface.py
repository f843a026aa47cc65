"""Small models of transformers, for tests/integrations alone: the core suite runs without that package."""

from __future__ import annotations

import torch
from constructs import VOCAB, Construct, Padded, of_model, targets_of
from transformers import GPT2Config, GPT2LMHeadModel, Qwen2Config, Qwen2ForCausalLM


def gpt2() -> torch.nn.Module:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB,
            n_positions=16,
            n_embd=32,
            n_layer=2,
            n_head=2,
            resid_pdrop=0,
            embd_pdrop=0,
            attn_pdrop=0,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def qwen2(layers: int = 2) -> torch.nn.Module:
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=16,
        )
    )


def checkpointed_gpt2() -> torch.nn.Module:
    model = gpt2()
    model.gradient_checkpointing_enable()
    return model.train()


CONSTRUCTS: dict[str, Construct] = {
    "GPT-2": Construct(gpt2, of_model, stream=Padded),
    "GPT-2 with gradient_checkpointing_enable()": Construct(checkpointed_gpt2, of_model, stream=Padded),
    "Qwen2, mean over all tokens of padded batches": Construct(
        qwen2, of_model, weight=targets_of, stream=Padded
    ),
}
