"""The reference models, built from parts of torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from recover.train.models.llama_config import SIZES, LlamaConfig

if TYPE_CHECKING:
    from recover.train.models.llama import Llama

__all__ = ["SIZES", "Llama", "LlamaConfig"]


def __getattr__(name: str) -> Any:
    """Import the model when it is first used, so that its shape can be read without torch."""
    if name == "Llama":
        from recover.train.models.llama import Llama

        return Llama
    raise AttributeError(f"module 'recover.train.models' has no attribute {name!r}")
