"""Checks that all adapters make: what they rely on in a trainer, and settings that they refuse."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any


def check_signatures(
    package: str,
    tested: Sequence[str],
    owners: Mapping[Any, Mapping[str, str]],
    adapter: str,
    warn: Callable[[str], Any],
) -> None:
    """Raise if a function has other parameters than the adapter was written for; warn of an untested
    version of the package.

    owners: parameters, separated by spaces, by name of the function and by class or module
    """
    found = version(package)
    if found not in tested:
        warn(f"{adapter} was tested with {package} {', '.join(tested)}, not {found}")
    for owner, functions in owners.items():
        for name, expected in functions.items():
            function = getattr(owner, name, None)
            parameters = " ".join(inspect.signature(function).parameters) if function else "there is none"
            if parameters != expected:
                raise RuntimeError(
                    f"{owner.__name__}.{name}({parameters}) of {package} {found} has other parameters than "
                    f"({expected}), which {adapter} relies on; install {package}=={tested[-1]}"
                )


def broken_rules(config: Any, rules: str) -> Iterator[str]:
    """Cause, value and remedy of each broken rule.

    rules: one in a line, `SETTING VALUE,VALUE | why no other value | remedy`; a setting may be a dotted path, and
           one that `config` does not have breaks no rule
    """
    for rule in rules.strip().splitlines():
        setting, cause, remedy = rule.split(" | ")
        path, _, allowed = setting.partition(" ")
        value = config
        for name in path.split("."):
            value = getattr(value, name, None)
        if str(value) not in (*allowed.split(","), "None"):
            yield f"{cause} ({path} is {value}); {remedy}"
