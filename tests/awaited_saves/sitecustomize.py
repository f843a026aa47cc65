"""With this folder on PYTHONPATH a run writes and names each checkpoint before it goes on.

A run leaves a checkpoint out while another one is being written, so which of them there are depends on the disk and
the load. Tests that count checkpoints wait for each instead. Python imports this file when it starts.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any


class Awaited(PathFinder):
    """Changes `recover.checkpoint.saver` when it is imported, and imports nothing before."""

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = super().find_spec(name, path, target)
        if name == "recover.checkpoint.saver" and spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_change(module: Any) -> None:
                load(module)
                found_equal = module.Saver.found_equal

                def found_equal_and_named(saver: Any, *about: Any) -> None:
                    found_equal(saver, *about)
                    saver.finish()

                module.Saver.found_equal = found_equal_and_named

            spec.loader.exec_module = load_and_change  # type: ignore[method-assign]
        return spec


sys.meta_path[sys.meta_path.index(PathFinder)] = Awaited
