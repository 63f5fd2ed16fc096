"""A private artifact copy for one model version.

Workers map an artifact's weights into memory. If the files are overwritten in place, a running
version would compute with other weights, or workers would crash. A replacement worker must also
load the files that the version began with.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from regauge.system.log import logger

if TYPE_CHECKING:
    from regauge.inference.export.artifact import Artifact

PREFIX = "artifact-"


def create_snapshot(artifact: Artifact) -> Artifact:
    """Copy an artifact to the command's temporary folder; return the copy.

    Without enough disk space, logs a warning and returns the artifact itself.
    """
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    try:
        shutil.copytree(artifact.folder, folder, dirs_exist_ok=True)
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        # shutil.Error has a list of (source, target, reason).
        reason = error.args[0][0][2] if isinstance(error, shutil.Error) else error
        message = "%s is served without a copy of its files (%s); do not overwrite them"
        logger.warning(message, artifact.folder, reason)
        return artifact
    return replace(artifact, folder=folder, source=artifact.folder)


def remove_snapshot(artifact: Artifact) -> None:
    """Remove a copy's files; original artifacts are kept."""
    if artifact.source is not None:
        shutil.rmtree(artifact.folder, ignore_errors=True)
