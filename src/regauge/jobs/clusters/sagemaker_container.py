"""The `serve` command in a SageMaker container: serves the model that SageMaker unpacks.

    python -m regauge.jobs.clusters.sagemaker_container

SageMaker mounts the model archive at `/opt/ml/model`. It is an artifact, or contains one folder per
artifact. The endpoint sets these environment variables:

    SAGEMAKER_BIND_TO_PORT   port to listen on, by default 8080
    REGAUGE_SERVE_OPTIONS    setting overrides, such as "serve.overflow=truncate"
    REGAUGE_MODEL_NAME       the only model's name, by default `model`

Source: https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-inference-code.html.
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from regauge.inference.export.manifest import MANIFEST
from regauge.jobs.targets._sagemaker import NAME_VARIABLE, OPTIONS_VARIABLE
from regauge.system.errors import ERROR_PREFIX, SettingsError

if TYPE_CHECKING:
    from collections.abc import Mapping

MODEL_FOLDER = "/opt/ml/model"
FOLDER_VARIABLE = "SM_MODEL_DIR"
PORT_VARIABLE, DEFAULT_PORT = "SAGEMAKER_BIND_TO_PORT", "8080"
DRAINING = "serve.http.drain_seconds=25"
"""SageMaker kills a container 30 seconds after SIGTERM."""


def build_command(variables: Mapping[str, str]) -> list[str]:
    """Return the `regauge` arguments that serve a container's models.

    Raises SettingsError without a model.
    """
    folder = Path(variables.get(FOLDER_VARIABLE, MODEL_FOLDER))
    port = variables.get(PORT_VARIABLE, DEFAULT_PORT)
    options = shlex.split(variables.get(OPTIONS_VARIABLE, ""))
    models = _list_models(folder, variables.get(NAME_VARIABLE, "model"))
    return ["serve", *models, DRAINING, *options, "--host", "0.0.0.0", "--port", port]  # noqa: S104 - as SageMaker requires


def _list_models(folder: Path, name: str) -> list[str]:
    """Return the artifact folders: SageMaker's model folder itself, or folders inside it."""
    if (folder / MANIFEST).is_file():
        return [f"{name}={folder}"]
    folders = sorted(path.parent for path in folder.glob(f"*/{MANIFEST}"))
    if not folders:
        problem = f"{folder} has no artifact: {MANIFEST} is missing"
        raise SettingsError(
            problem, "pack the files of an artifact: tar -czf model.tar.gz -C DIR ."
        )
    return [f"{path.name}={path}" for path in folders]


def main() -> None:
    """Replace this process with the server, or end it if the container lacks a model."""
    try:
        command = build_command(os.environ)
    except SettingsError as error:
        sys.stderr.write(f"{ERROR_PREFIX}{error}\n")
        sys.exit(error.exit_code)
    os.execv(sys.executable, [sys.executable, "-m", "regauge", *command])  # noqa: S606 - no shell


if __name__ == "__main__":
    main()
