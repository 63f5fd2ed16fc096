"""What vendor libraries need: environment variables, a C++ compiler, the version of torch."""

from __future__ import annotations

import os
import shutil
from importlib.metadata import PackageNotFoundError, version

from regauge.system.errors import SettingsError

COMPILERS = ("g++", "clang++")
"""The C++ compilers that torch.compile uses for host code."""


def set_variable(name: str, value: str) -> None:
    """Set an environment variable; raises SettingsError if it already has another value."""
    foreign = os.environ.setdefault(name, value)
    if foreign != value:
        raise SettingsError(
            f"{name}={foreign} in the environment contradicts the run's settings, {name}={value}",
            f"unset {name}, or change the settings of the accelerator",
        )


def compiler_obstacle() -> str | None:
    """Return why no C++ code can be compiled, or None."""
    if any(map(shutil.which, COMPILERS)):
        return None
    return f"no C++ compiler is installed ({' or '.join(COMPILERS)})"


def torch_version_obstacle(package: str) -> str | None:
    """Return why a package does not work with the installed torch, or None.

    Its version starts with the version of torch that it needs.
    """
    try:
        torch, installed = version("torch"), version(package)
    except PackageNotFoundError as error:
        return f"{error.name} is not installed as a package"
    needed = installed.split(".")[:2]
    if torch.split(".")[:2] == needed:
        return None
    return f"{package} {installed} needs torch {'.'.join(needed)}; torch {torch} is installed"
