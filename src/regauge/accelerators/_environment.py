"""Environment variables that a device's software reads, set from settings."""

from __future__ import annotations

import os

from regauge.errors import SettingsError


def impose(name: str, value: str) -> None:
    """Set an environment variable that a setting decides.

    Raises SettingsError where something else has set it to another value.
    """
    foreign = os.environ.setdefault(name, value)
    if foreign != value:
        raise SettingsError(
            f"{name}={foreign} is set from outside, and the run's settings say {value}",
            f"unset {name}, or set the accelerator's settings to it",
        )
