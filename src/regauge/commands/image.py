"""Write the Dockerfile for a container image with Regauge and a run file, build it or push it.

For example:

    $ regauge image build run.toml
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from regauge import commands
from regauge.jobs.clusters import images
from regauge.jobs.clusters.settings import ImageSettings
from regauge.system.errors import SettingsError

ROOT = ImageSettings
OUTPUT = "image.folder"

Action = Literal["render", "build", "push"]


def main(
    action: Annotated[Action, Parameter(help="Write the Dockerfile, build it, or push it.")],
    run_file: commands.RunFile,
    *overrides: commands.Override,
    to: Annotated[Path | None, Parameter(help="Dockerfile folder; default: image.folder.")] = None,
    overwrite: commands.Overwrite = False,
    dry_run: commands.DryRun = False,
    json: commands.AsJson = False,
) -> dict[str, Any]:
    """Write a run file's Dockerfile, build its image, or push it.

    `build` and `push` use docker, podman or buildah: the first one that works on this machine.

    For example:

        >>> regauge.image("build", "run.toml")
    """
    folder = () if to is None else (f"{OUTPUT}={to}",)
    settings = commands.load_settings(ROOT, run_file, (*overrides, *folder))
    if dry_run:
        return commands.show(plan(settings, run_file, action), as_json=json)
    return commands.show(run(settings, run_file, action, overwrite=overwrite), as_json=json)


def plan(
    settings: ImageSettings, run_file: Path | None = None, action: Action = "render"
) -> dict[str, Any]:
    """Return the Dockerfile and an action's commands.

    Raises SettingsError for invalid settings.
    """
    if run_file is None:
        return {"image": images.resolve_name(settings)}
    answer = images.describe_image(settings, run_file)
    answer["dockerfile"] = images.render_image(settings, run_file)
    tool = settings.image.tool if settings.image.tool != "auto" else images.TOOLS[0]
    if action != "render":
        folder = Path(settings.image.folder)
        command = images.build_command(tool, action, answer["image"], folder)
        answer["commands"] = [shlex.join(command)]
    return answer


def run(
    settings: ImageSettings,
    run_file: Path | None = None,
    action: Action = "render",
    *,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Write the Dockerfile, and build or push the image; return the files and the commands."""
    if run_file is None:
        raise SettingsError("an image contains a run file", "run 'regauge image' with its path")
    answer, folder = images.describe_image(settings, run_file), Path(settings.image.folder)
    tool = None if action == "render" else images.find_tool(settings.image)
    if action != "push":
        can_overwrite = overwrite or action == "build"
        paths = images.write_context(settings, run_file, overwrite=can_overwrite)
        answer["files"] = [str(path) for path in paths]
    if tool is not None:
        command = images.build_command(tool, action, answer["image"], folder)
        images.run_command(command)
        answer["commands"] = [shlex.join(command)]
    return answer
