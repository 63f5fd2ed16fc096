"""Secrets in files: `launch.secrets` has file paths, and only the nodes read the values.

A reference is `file:/path`. Every node in the job must be able to read the path.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from regauge.jobs.targets import JobSpec
from regauge.system.errors import DataError, SettingsError

PREFIX = "file:"


def check_secret_files(job: JobSpec) -> None:
    """Raise SettingsError for a reference to anything but a file.

    The message omits the reference, because it may be the secret itself.
    """
    for name, reference in job.secrets.items():
        if not reference.startswith(f"{PREFIX}/"):
            problem = f"launch.secrets.{name} is not a reference of this target"
            raise SettingsError(problem, "set it to file:/path of a file on every node")


def parse_secret_path(reference: str) -> str:
    return reference.removeprefix(PREFIX)


def read_secret_files(secrets: Mapping[str, str]) -> dict[str, str]:
    """Return variable -> secret; raises DataError for an unreadable file."""
    values = {}
    for name, reference in secrets.items():
        path = Path(parse_secret_path(reference))
        try:
            values[name] = path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            problem = f"launch.secrets.{name} cannot be read from {path} on this node: {reason}"
            raise DataError(problem, "create that file on every node") from None
    return values
