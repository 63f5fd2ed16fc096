"""Vendor environment variables set from run settings."""

from __future__ import annotations

import os

from regauge.system.errors import SettingsError


def set_variable(name: str, value: str) -> None:
    """Set an environment variable.

    Raises SettingsError if it already has another value.
    """
    foreign = os.environ.setdefault(name, value)
    if foreign != value:
        raise SettingsError(
            f"{name}={foreign} in the environment contradicts the run's settings, {name}={value}",
            f"unset {name}, or change the settings of the accelerator",
        )
