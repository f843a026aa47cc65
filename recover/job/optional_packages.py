"""Optional packages: an error where one is needed and missing names it, and how to install it."""

from __future__ import annotations

from importlib.util import find_spec

BROUGHT_BY = {  # the extra of recover that brings a package
    "tokenizers": "train",
    "tensorboard": "train",
    "matplotlib": "train",
    "prometheus_client": "watch",
    "ray": "ray",
}


class MissingExtra(ValueError):
    """A package is not installed. The message says which, what needs it, and how to install it."""


def need(package: str, what: str, otherwise: str = "") -> None:
    """Raise MissingExtra if `package` is not installed. `what` needs it; `otherwise`: how to do
    without it."""
    if find_spec(package) is None:
        wanted = f"'recover-train[{BROUGHT_BY[package]}]'" if package in BROUGHT_BY else package
        raise MissingExtra(
            f"{what} needs the package {package}, which is not installed; `pip install {wanted}`"
            + (f", or {otherwise}" if otherwise else "")
        )
