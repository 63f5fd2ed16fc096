"""Register an artifact, and let it serve.

For example:

    $ regauge promote pipeline.toml
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from regauge import commands, config
from regauge.config import Settings
from regauge.registry.pipelines.gate_check import GATE, GateRecord, read_evaluation
from regauge.registry.pipelines.serving_model import PROMOTION, find_serving_version
from regauge.registry.pipelines.settings import PromoteOptions, RegistryModel, StageOutput
from regauge.registry.registry import Registry
from regauge.system import log
from regauge.system.errors import DataError
from regauge.system.files import check_folder


class PromoteSettings(Settings):
    """Artifact promotion."""

    promote: PromoteOptions
    """Artifact and evidence."""
    registry: RegistryModel
    """Registry, model name and the stage to move."""
    output: StageOutput
    """Record folder."""


ROOT = PromoteSettings
OUTPUT = "output.folder"


def main(
    run_file: commands.RunFile,
    *overrides: commands.Override,
    dry_run: commands.DryRun = False,
    json: commands.AsJson = False,
) -> dict[str, Any]:
    """Register an artifact with its lineage, and point the registry stage to it.

    With `promote.gate`, the artifact must have passed that gate, and the serving model must be the
    one that the gate compared it with.

    For example:

        >>> regauge.promote("pipeline.toml")
    """
    settings = commands.load_settings(ROOT, run_file, overrides)
    answer = plan(settings) if dry_run else run(settings)
    return commands.show(answer, as_json=json)


def plan(settings: PromoteSettings) -> dict[str, Any]:
    """Return the artifact, and the stage to move."""
    check_folder(Path(settings.output.folder), "output.folder")
    registry = settings.registry
    return {
        "artifact": settings.promote.artifact,
        "registry": registry.path,
        "stage": f"{registry.model}@{registry.stage}",
    }


def run(settings: PromoteSettings) -> dict[str, Any]:
    """Register and promote the artifact; the same command after a kill completes it.

    Raises DataError if an artifact file is damaged, if the gate refused it, or if another model
    serves now than at the gate.
    """
    folder, options = Path(settings.output.folder), settings.promote
    check_folder(folder, "output.folder")
    gate = _read_gate(options.gate)
    registry = Registry(settings.registry.path, create=True)
    model = settings.registry.model
    evaluation = _read_evidence(options, gate)
    registered = registry.register(model, options.artifact, evaluation=evaluation)
    version, previous = str(registered.number), find_serving_version(settings.registry)
    record = {
        "model": model,
        "version": version,
        "stage": settings.registry.stage,
        "previous_version": previous,
        "artifact": options.artifact,
        "content_sha256": registered.content_sha256,
    }
    if version != previous:
        if gate is not None and gate["serving_version"] != previous:
            compared = gate["serving_version"] or "none"
            problem = f"version {previous or 'none'} serves, but the gate compared with {compared}"
            raise DataError(problem, "run the evaluation and the gate again")
        folder.mkdir(parents=True, exist_ok=True)
        config.save(folder / PROMOTION, record)
        registry.promote(
            model,
            registered.number,
            settings.registry.stage,
            why=_describe_reason(gate),
            expected_version=None if previous is None else int(previous),
        )
        log.logger.info("%s@%s is version %s", model, settings.registry.stage, version)
    return record


def _read_gate(gate: str | None) -> dict[str, Any] | None:
    if gate is None:
        return None
    path = Path(gate) / GATE
    document = config.find_document(path, "run 'regauge gate' again", GateRecord)
    if document is None:
        raise DataError(f"{path} is missing", "run 'regauge gate' first")
    if not document["passed"]:
        raise DataError(f"the gate {gate} refused the new model", "improve the model")
    return document


def _read_evidence(options: PromoteOptions, gate: dict[str, Any] | None) -> dict[str, Any] | None:
    if options.evaluation is None and gate is None:
        return None
    evidence: dict[str, Any] = {}
    if options.evaluation is not None:
        table = read_evaluation(options.evaluation)
        evidence["evaluation"] = options.evaluation
        evidence["rows"] = table["rows"]
        evidence["data_fingerprint"] = table["identity"]["data_fingerprint"]
    if gate is not None:
        evidence["gate"] = gate["metrics"]
    return evidence


def _describe_reason(gate: dict[str, Any] | None) -> str:
    if gate is None:
        return "promoted without a gate"
    values = [f"{row['name']} {row['new']}" for row in gate["metrics"]]
    return f"passed the gate: {', '.join(values)}"
