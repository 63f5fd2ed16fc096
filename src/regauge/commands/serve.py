"""Serve artifacts over HTTP.

For example:

    $ regauge serve out/artifact --port 8080
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from regauge import commands, config
from regauge.commands import AsJson, DryRun
from regauge.inference.export.artifact import is_artifact, open_unchecked
from regauge.registry.model_reference import locate_model, parse_reference
from regauge.serving.settings import ServeSettings
from regauge.system.errors import PreflightError, SettingsError

ROOT = ServeSettings
PACKAGES = ("starlette", "uvicorn", "httptools", "uvloop", "orjson", "prometheus_client")
"""Packages in the extra `serve`."""

Answer = dict[str, Any]


def main(
    run_file: Annotated[
        Path, Parameter(help="Artifact, run, model or REGISTRY/NAME@STAGE; or run file.")
    ],
    *overrides: Annotated[
        str, Parameter(help="More artifacts, as FOLDER or NAME=FOLDER, and overrides.")
    ],
    port: Annotated[int | None, Parameter(help="Port to listen on; 0 selects a free one.")] = None,
    host: Annotated[str | None, Parameter(help="Address to listen on.")] = None,
    dry_run: DryRun = False,
    json: AsJson = False,
) -> Answer:
    """Serve models over HTTP until a stop signal; accepted requests are then completed.

    For example:

        >>> regauge.serve("out/artifact", port=8080)
    """
    flags = [("serve.port", port), ("serve.host", host)]
    assignments = tuple(f"{key}={value}" for key, value in flags if value is not None)
    settings = load((str(run_file), *overrides, *assignments))
    if dry_run:
        return commands.show(plan(settings), as_json=json)
    return commands.show(run(settings), as_json=json)


def load(arguments: tuple[str, ...]) -> ServeSettings:
    """Build the settings from a run file, or from model folders."""
    run_file = Path(arguments[0])
    if run_file.suffix in commands.RUN_FILE_SUFFIXES:
        return commands.load_settings(ServeSettings, run_file, arguments[1:])
    artifacts: dict[str, str] = {}
    overrides = []
    for argument in arguments:
        name, separator, folder = argument.partition("=")
        if separator and "." in name:
            overrides.append(argument)
            continue
        folder = folder if separator else argument
        reference = parse_reference(folder)
        default_name = Path(folder).resolve().name if reference is None else reference.name
        name = name if separator else default_name
        if name in artifacts:
            remedy = f"name it: NAME={folder}"
            raise SettingsError(f"two models are called '{name}'", remedy)
        artifacts[name] = folder
    tables = config.apply_overrides(
        {"serve": {"artifacts": artifacts}}, tuple(overrides), ServeSettings
    )
    return config.build(ServeSettings, commands.allow_user_code(Path(), tables))


def plan(settings: ServeSettings) -> Answer:
    """Return the models and the server address, without loading a model."""
    models = []
    for name, folder in settings.serve.artifacts.items():
        path = Path(locate_model(folder)).expanduser()
        row: dict[str, Any] = {"name": name, "folder": folder}
        if is_artifact(path):
            manifest = open_unchecked(path).manifest
            compiled = manifest.compiled
            row["output_kind"] = manifest.program.output_kind
            row["backend"] = f"{compiled.backend.kind} {compiled.precision}"
        elif not path.is_dir():
            raise SettingsError(f"no model at {folder}", "name the folder of an artifact")
        models.append(row)
    address = f"http://{settings.serve.host}:{settings.serve.port}"
    options = settings.serve.workers.ray
    if options is None:
        return {"models": models, "address": address}
    cluster = options.address or "a Ray on this machine"
    return {
        "models": models,
        "address": f"{address}{options.route_prefix.rstrip('/')}",
        "ray": {"cluster": cluster, "replicas": options.replicas},
    }


def run(settings: ServeSettings) -> Answer:
    """Serve until a stop signal; return the number of answered requests."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        problem = f"the server needs {', '.join(missing)}"
        raise PreflightError(problem, "install it: pip install 'regauge[serve]'")
    options = settings.serve.workers.ray
    if options is not None:
        from regauge.serving.ray_cluster.ray_serving import run_on_ray

        return run_on_ray(settings.serve, options)
    from regauge.serving.server import run_server

    return run_server(settings.serve)
