"""A copy of an artifact that only one version of a model reads.

Workers map the weights of an artifact into memory. If its files are overwritten in place, a running
version would compute with other weights, or its workers would end. A replaced worker must also load
the files that its version began with.
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
    """Copy an artifact to the temporary folder of the command; return the artifact of the copy.

    Without enough disk space, a warning is logged and the artifact itself is returned.
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
    """Remove the files of a copy; an artifact that is no copy is kept."""
    if artifact.source is not None:
        shutil.rmtree(artifact.folder, ignore_errors=True)
