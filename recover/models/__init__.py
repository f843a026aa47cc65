"""The reference models, on torch's own parts."""

from recover.models.llama import SIZES, Llama, LlamaConfig

__all__ = ["SIZES", "Llama", "LlamaConfig"]
