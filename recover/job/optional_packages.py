"""Packages that not everybody needs: what is missing is named where it is needed, with the mend."""

from __future__ import annotations

from importlib.util import find_spec

BROUGHT_BY = {  # the extra of recover that brings a package
    "tokenizers": "train",
    "tensorboard": "train",
    "matplotlib": "train",
    "prometheus_client": "watch",
}


class MissingExtra(ValueError):
    """A package is not installed; the message says which, what for, and how to get it."""


def need(package: str, what: str, otherwise: str = "") -> None:
    """Raises MissingExtra if `package` is not there. `what` needs it; `otherwise` is a way to do
    without."""
    if find_spec(package) is None:
        wanted = f"'recover-train[{BROUGHT_BY[package]}]'" if package in BROUGHT_BY else package
        raise MissingExtra(
            f"{what} needs the package {package}, which is not installed; `pip install {wanted}`"
            + (f", or {otherwise}" if otherwise else "")
        )
