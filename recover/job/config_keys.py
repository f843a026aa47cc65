"""Configuration keys: pydantic models that are filled from a YAML file and from `key=value` words.

`recover train` and `recover simulate` read their keys through this module, so that both name the nearest key or choice
in the same words. Values stay text until the model parses them: YAML itself would read 3e-4 as a string and `no` as a
truth value.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

_NULL = ("", "~", "null", "none")


class ConfigError(ValueError):
    """A key or a value that cannot be used. The message names the cause, the value and the remedy."""


class Keys(BaseModel):
    """Base of all groups of keys: unknown names, NaN and infinity are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


K = TypeVar("K", bound=Keys)


def parse_keys(model: type[K], given: Mapping[str, Any], command: str) -> K:
    """Build `model` from dotted keys. Raises ConfigError; `command` is the one whose --help lists the keys."""
    known = {key for key, _, _ in describe(model)}
    tree: dict[str, Any] = {}
    for key, value in given.items():
        if key not in known:
            raise ConfigError(_unknown(key, known, command))
        group, _, name = key.rpartition(".")
        values = tree.setdefault(group, {}) if group else tree
        values[name] = None if isinstance(value, str) and value.strip().lower() in _NULL else value
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("; ".join(_explain(model, detail) for detail in error.errors())) from None


def read(words: Sequence[str]) -> dict[str, Any]:
    """Read `[CONFIG.yaml] [KEY=VALUE]...` as dotted keys; later words win. Raises ConfigError."""
    given: dict[str, Any] = {}
    if words and "=" not in words[0]:
        given, words = read_file(Path(words[0])), words[1:]
    return given | read_words(words)


def read_file(path: Path) -> dict[str, Any]:
    """Read a YAML file as dotted keys, with the values as text. Raises ConfigError."""
    try:
        tree = yaml.load(path.read_text(), Loader=yaml.BaseLoader)
    except OSError as error:
        raise ConfigError(f"config {path} cannot be read ({error.strerror}); check the path") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"config {path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree or {}, dict):
        raise ConfigError(f"config {path} is not a list of `key: value` lines")
    return dict(flatten(tree or {}))


def read_words(words: Iterable[str]) -> dict[str, str]:
    """Read `key=value` words. Raises ConfigError."""
    pairs = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(f"{word!r} is neither a YAML file that comes first nor of the form key=value")
        pairs[key.strip()] = value
    return pairs


def flatten(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield nested mappings as dotted keys."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def describe(model: type[BaseModel], above: str = "") -> Iterator[tuple[str, Any, str]]:
    """Yield every key with its default and its description."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Keys):
            yield from describe(field.annotation, f"{above}{name}.")
        else:
            yield above + name, field.default, field.description or ""


def nearest(word: str, choices: Iterable[str], otherwise: str) -> str:
    """The remedy for a misspelt word: the nearest choice, or `otherwise` if none is near."""
    near = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else otherwise


def _unknown(key: str, known: set[str], command: str) -> str:
    inside = sorted(name for name in known if name.startswith(f"{key}."))
    if inside:
        return f"{key!r} is a group of keys; say which: {', '.join(inside)}"
    return f"there is no key {key!r}; {nearest(key, known, f'`{command} --help` lists them all')}"


def _explain(model: type[BaseModel], detail: ErrorDetails) -> str:
    key, value = ".".join(map(str, detail["loc"])), detail["input"]
    match detail["type"]:
        case "value_error":  # raised by a validator of ours, which names everything
            return str(detail["ctx"]["error"])
        case "literal_error":
            hint = nearest(str(value), _choices(model, detail["loc"]), "choose another")
            return f"{key}={value!r} must be {detail['ctx']['expected']}; {hint}"
        case "int_parsing" | "int_type" | "int_from_float":
            return f"{key}={value!r} must be a whole number"
        case "float_parsing" | "float_type":
            return f"{key}={value!r} must be a number"
        case "bool_parsing" | "bool_type":
            return f"{key}={value!r} must be true or false"
    return f"{key}={value!r} {detail['msg'].replace('Input should', 'must')}"


def _choices(model: Any, location: tuple[int | str, ...]) -> tuple[str, ...]:
    for name in location:
        model = model.model_fields[name].annotation
    return tuple(map(str, get_args(model)))
