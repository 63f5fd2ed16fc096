"""Register models with their lineage, promote them to stages, and trace what made a file.

For example:

    $ regauge models list --registry out/registry
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from regauge import commands
from regauge.config import flatten
from regauge.registry.check import check_registry
from regauge.registry.registry import Registry
from regauge.system.errors import DataError, SettingsError
from regauge.system.json_files import read_json

if TYPE_CHECKING:
    from regauge.registry.registered_version import RegisteredVersion

Action = Literal["register", "list", "show", "promote", "rollback", "verify", "trace"]
REGISTRY_VARIABLE = "REGAUGE_REGISTRY"
STAGE = "production"


@Parameter(name="*")
@dataclass(frozen=True)
class RegisterOptions:
    run: Annotated[
        Path | None, Parameter(help="With register: the model's run; default: its origin.")
    ] = None
    parent: Annotated[int | None, Parameter(help="With register: start version for training.")] = (
        None
    )
    evaluation: Annotated[
        Path | None, Parameter(help="With register: evaluation.json with the scores.")
    ] = None
    by_reference: Annotated[
        bool, Parameter(help="With register: record the folder instead of copying its files.")
    ] = False


@Parameter(name="*")
@dataclass(frozen=True)
class StageOptions:
    stage: Annotated[
        str | None, Parameter(help="Stage, such as staging; by default production.")
    ] = None
    why: Annotated[str | None, Parameter(help="Reason for a change, for the log.")] = None
    expect: Annotated[
        int | None, Parameter(help="With promote: version currently required in the stage.")
    ] = None
    create_stage: Annotated[
        bool, Parameter(help="With promote: permit a new stage for the model.")
    ] = False
    at: Annotated[
        str | None, Parameter(help="With show: the version at a time, such as 2026-11-20T12:00.")
    ] = None


def main(
    action: Annotated[Action, Parameter(help="Action on the registry.")],
    name: Annotated[
        str | None, Parameter(help="Model; with trace: file or output folder of predict.")
    ] = None,
    item: Annotated[
        str | None, Parameter(help="Version; with register: artifact, run or model.")
    ] = None,
    *,
    registry: Annotated[
        str | None,
        Parameter(help=f"Folder or s3://bucket/prefix; by default ${REGISTRY_VARIABLE}."),
    ] = None,
    new: RegisterOptions = RegisterOptions(),
    change: StageOptions = StageOptions(),
    json: commands.OutputFormat = commands.TEXT,
) -> dict[str, Any]:
    """Register a model, list and show versions, change a stage, verify files, or trace a file.

    `verify` exits with code 64 if something differs.
    """
    address = registry or os.environ.get(REGISTRY_VARIABLE)
    if action == "trace":
        return _print(trace(_require(name, "FILE"), address), as_json=json.is_json)
    opened = Registry(_check_address(address), create=action == "register")
    if action == "verify":
        return _verify(opened, name, item, as_json=json.is_json)
    if action == "list":
        answer = list_models(opened, name)
    elif action == "register":
        answer = register(opened, _require(name, "NAME"), _require(item, "ARTIFACT"), new)
    elif action == "show":
        answer = show(opened, _require(name, "NAME"), item, change)
    else:
        answer = change_stage(opened, _require(name, "NAME"), item, action, change)
    return _print(answer, as_json=json.is_json)


def trace(path: str, address: str | None) -> dict[str, Any]:
    """Return the data, code, settings, checkpoint and version behind a file or folder."""
    from regauge.inference.predict.provenance import trace_output

    registry = None if address is None else Registry(address)
    return trace_output(Path(path).expanduser(), registry)


def list_models(registry: Registry, name: str | None) -> dict[str, Any]:
    """Return a row per model, or per version of one model."""
    if name is None:
        rows = [_summarize_model(registry, model) for model in registry.list_models()]
        return {"registry": registry.address, "models": rows}
    stages = registry.list_stages(name)
    versions = [
        {
            **version.summarize(),
            "stages": ", ".join(
                stage for stage, number in stages.items() if number == version.number
            ),
        }
        for version in registry.list_versions(name)
    ]
    return {"registry": registry.address, "model": name, "versions": versions}


def register(registry: Registry, name: str, model: str, options: RegisterOptions) -> dict[str, Any]:
    """Register a model; return the version."""
    scores = None
    if options.evaluation is not None:
        scores = read_json(options.evaluation, "name the evaluation.json of an evaluation")
    version = registry.register(
        name,
        model,
        run=options.run,
        parent=options.parent,
        evaluation=scores,
        by_reference=options.by_reference,
    )
    return {
        "model": name,
        **version.summarize(),
        "reference": version.reference,
        "registered": "now" if version.is_new else "earlier",
    }


def show(registry: Registry, name: str, item: str | None, options: StageOptions) -> dict[str, Any]:
    """Return a version with lineage, or a model with stages and logs."""
    if options.at is not None:
        stage = options.stage or STAGE
        version = registry.find_at(name, options.at, stage)
        answer: dict[str, Any] = {"model": name, "stage": stage, "at": options.at}
        return answer | (_describe(version) if version else {"version": None})
    if item is not None:
        return _describe(registry.resolve(name, _parse_version(item)))
    if options.stage is not None:
        return _describe(registry.resolve(name, options.stage))
    stages = registry.list_stages(name)
    log = [entry.summarize() for stage in stages for entry in registry.read_log(name, stage)]
    log.sort(key=lambda row: (row["at"], row["number"]))
    return {**list_models(registry, name), "stages": stages, "log": log}


def change_stage(
    registry: Registry, name: str, item: str | None, action: Action, options: StageOptions
) -> dict[str, Any]:
    """Promote a version or roll back a stage; return the log entry."""
    stage, why = options.stage or STAGE, options.why or ""
    if action == "rollback":
        if item is not None:
            remedy = f"leave it out, or run: regauge models promote {name} {item}"
            raise SettingsError("rollback does not take a version", remedy)
        entry = registry.roll_back(name, stage, why=why)
    else:
        entry = registry.promote(
            name,
            _parse_version(_require(item, "VERSION")),
            stage,
            why=why,
            expected_version=options.expect,
            create_stage=options.create_stage,
        )
    return {"model": name, **entry.summarize(), "changed": entry.is_new}


def _verify(
    registry: Registry, name: str | None, item: str | None, *, as_json: bool
) -> dict[str, Any]:
    number = None if item is None else _parse_version(item)
    summary = check_registry(registry, name, number)
    answer = commands.show({"registry": registry.address, **summary.to_document()}, as_json=as_json)
    if summary.findings:
        first = summary.findings[0]
        problem = f"{len(summary.findings)} problems; the first is {first.subject}: {first.problem}"
        raise DataError(problem, first.remedy)
    return answer


def _print(answer: dict[str, Any], *, as_json: bool) -> dict[str, Any]:
    """Print an answer; on a terminal, only count a job's settings and options."""
    commands.show(answer if as_json else _shorten(answer), as_json=as_json)
    return answer


def _shorten(answer: dict[str, Any]) -> dict[str, Any]:
    """Return an answer for a terminal: long tables are counted, and hashes and times are short."""
    short = dict(answer)
    if "at" in short and short.get("version", 0) is None:
        short["version"] = "none"
    if settings := short.get("settings"):
        short["settings"] = f"{len(flatten(settings))} keys; --json prints them"
    if "predict" in short:
        job = short.pop("predict")
        short["predicted from"] = job["inputs"]
        short["predicted with"] = _join_values(job["code"] or {})
    if "data" in short:
        datasets = short["data"] or ()
        short["data"] = [_select(row, "path", "rows", "fingerprint") for row in datasets]
    if code := short.get("code"):
        texts: dict[str, Any] = {"python": code.get("python")}
        texts |= {**(code.get("packages") or {}), **(code.get("code") or {})}
        short["code"] = _join_values(texts if any(texts.values()) else code["registered_with"])
    for table in ("versions", "log"):
        rows = short.get(table) if isinstance(short.get(table), list) else ()
        short |= {table: [_shorten_times(row) for row in rows]} if rows else {}
    return short


def _select(row: dict[str, Any], *names: str) -> str:
    values = {name: row.get(name) for name in names}
    if isinstance(counts := values.get("rows"), dict):
        values["rows"] = _join_values(counts)
    return ", ".join(f"{name} {value}" for name, value in values.items() if value is not None)


def _join_values(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items() if value is not None)


def _shorten_times(row: dict[str, Any]) -> dict[str, Any]:
    names = {"created_at", "at"}
    return {name: value[:16] if name in names else value for name, value in row.items()}


def _describe(version: RegisteredVersion) -> dict[str, Any]:
    document = version.document
    names = ("kind", "created_at", "created_by", "content_sha256", "parent", "usd")
    size = sum(item.bytes for item in version.hashes.values())
    return {
        "model": version.model,
        "version": version.number,
        "reference": version.reference,
        **{name: document.get(name) for name in names},
        "folder": version.folder,
        "files": len(version.hashes),
        "bytes": size,
        "parity": document.get("parity"),
        "evaluation": document.get("evaluation"),
        **document["lineage"],
    }


def _summarize_model(registry: Registry, name: str) -> dict[str, Any]:
    versions, stages = registry.list_versions(name), registry.list_stages(name)
    row: dict[str, Any] = {"name": name, "versions": len(versions)}
    return {**row, "latest": versions[-1].number, **stages}


def _parse_version(text: str) -> int:
    digits = text.removeprefix("v")
    if not digits.isdigit():
        raise SettingsError(f"'{text}' is not a version", "name its number, such as 3")
    return int(digits)


def _require(value: str | None, label: str) -> str:
    if value is None:
        raise SettingsError(f"the argument {label} is missing", "see 'regauge models --help'")
    return value


def _check_address(address: str | None) -> str:
    if address is None:
        remedy = f"add --registry FOLDER, or set {REGISTRY_VARIABLE}"
        raise SettingsError("no registry is named", remedy)
    return address
