"""References to registry models, such as `registry/qa@production` or `s3://bucket/r/qa@3`.

    ADDRESS/NAME@STAGE     the version that a stage points to
    ADDRESS/NAME@NUMBER    a version

A version in a folder is used where it is. A version in an S3 store is downloaded once:

    ~/.cache/regauge/models/<content hash>/    its files, below XDG_CACHE_HOME if that is set
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from regauge.registry.model_files import find_difference
from regauge.registry.registry import Registry
from regauge.registry.storage import FolderStorage
from regauge.system.errors import DataError
from regauge.system.files import find_cache_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from regauge.registry.registered_version import RegisteredVersion

_REFERENCE = re.compile(
    r"(?P<registry>.*[^/])/(?P<name>[A-Za-z0-9][\w.+-]*)@(?P<selector>[a-z][\w-]*|\d+)"
)
_COLLAPSED = re.compile(r"^([a-z][a-z0-9]+):/(?=[^/])")
"""Start of an address converted to `Path`, which keeps only one slash."""
STAGING_PREFIX = ".download-"


class ModelReference(NamedTuple):
    """A model version or stage in a registry."""

    registry: str
    """Registry address."""
    name: str
    """Model name."""
    selector: str
    """The stage or the version number."""

    def __str__(self) -> str:
        return f"{self.registry}/{self.name}@{self.selector}"

    def resolve(self) -> RegisteredVersion:
        """Return the version; raises like `Registry` and `Registry.resolve`."""
        return Registry(self.registry).resolve(self.name, self.selector)


def parse_reference(text: str | os.PathLike[str]) -> ModelReference | None:
    """Parse a reference; None for an existing path and any other text."""
    address = _COLLAPSED.sub(r"\1://", os.fspath(text))
    match = _REFERENCE.fullmatch(address)
    if match is None or Path(address).expanduser().exists():
        return None
    return ModelReference(**match.groupdict())


def locate_model(text: str) -> str:
    """Return a registry reference's local folder, and any other text unchanged.

    The version's files are verified. Raises like `Registry` and `Registry.resolve`, and DataError
    if a file is corrupted.
    """
    reference = parse_reference(text)
    if reference is None:
        return text
    return str(fetch_version(reference.resolve()))


def fetch_version(version: RegisteredVersion) -> Path:
    """Return a version's verified local folder, downloaded if it is in an S3 store.

    Raises DataError if a file is missing or corrupted, and TransientError if the store does not
    answer.
    """
    storage, key = version.file_storage
    if storage.local_folder is not None:
        version.check_files()
        return storage.local_folder / key
    target = find_cache() / version.content_sha256
    if find_difference(FolderStorage(str(target)), "", version.hashes) is not None:
        with _stage_download(target) as staging:
            _download(version, staging)
    return target


def find_cache() -> Path:
    """Return the folder for downloaded versions."""
    return find_cache_folder() / "models"


@contextmanager
def _stage_download(target: Path) -> Iterator[Path]:
    """Yield a new folder, which becomes `target` if the block succeeds.

    Several processes may download the same version at once. A damaged folder is replaced.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=STAGING_PREFIX, dir=target.parent))
    try:
        yield staging / target.name
        try:
            if target.exists():
                target.rename(staging / "old")
            (staging / target.name).rename(target)
        except OSError:  # another process was faster
            if not target.exists():
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _download(version: RegisteredVersion, folder: Path) -> None:
    """Download a version's files; raises DataError if one is missing or has changed."""
    storage, key = version.file_storage
    for name in version.hashes:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            storage.download(f"{key}/{name}" if key else name, path)
        except FileNotFoundError:
            break  # the comparison names the file
    difference = find_difference(FolderStorage(str(folder)), "", version.hashes)
    if difference is not None:
        version.check_files()  # names the file in the store
        problem = f"the download of {version.reference} is damaged: {difference}"
        raise DataError(problem, "try again")
