"""Environment variables of a vendor's software, set from the settings of a run."""

from __future__ import annotations

import os

from regauge.system.errors import SettingsError


def set_variable(name: str, value: str) -> None:
    """Set an environment variable to the value of a setting.

    Raises SettingsError if the environment already has another value.
    """
    foreign = os.environ.setdefault(name, value)
    if foreign != value:
        raise SettingsError(
            f"{name}={foreign} in the environment contradicts the run's settings, {name}={value}",
            f"unset {name}, or change the settings of the accelerator",
        )
