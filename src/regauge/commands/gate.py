"""Compare a new model with the serving model, and refuse a regression.

For example:

    $ regauge gate pipeline.toml
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge import commands, config
from regauge.config import Settings
from regauge.registry.pipelines.gate_check import (
    GATE,
    check_metrics,
    read_serving_table,
)
from regauge.registry.pipelines.serving_model import find_serving
from regauge.registry.pipelines.settings import GateOptions, RegistryModel, StageOutput
from regauge.system import choices, log
from regauge.system.errors import (
    DifferenceError,
    InconclusiveError,
    SettingsError,
    UndecidedError,
)
from regauge.system.files import check_folder

if TYPE_CHECKING:
    from regauge.registry.pipelines.gate_check import GatedMetric
    from regauge.registry.pipelines.serving_model import ServingModel


class GateSettings(Settings):
    """Gate for a new model."""

    gate: GateOptions
    """Evaluation and limits."""
    registry: RegistryModel | None = None
    """Registry with the serving model; without it, only the evaluation is read."""
    output: StageOutput
    """Record folder."""


ROOT = GateSettings
OUTPUT = "output.folder"


def main(
    run_file: commands.RunFile,
    *overrides: commands.Override,
    dry_run: commands.DryRun = False,
    json: commands.AsJson = False,
) -> dict[str, Any]:
    """Compare a new model's metrics with the serving model's.

    A regression beyond a metric's band ends with exit code 68, and too few evaluation rows to
    decide with 70. Nothing is promoted.

    For example:

        >>> regauge.gate("pipeline.toml")
    """
    settings = commands.load_settings(ROOT, run_file, overrides)
    answer = plan(settings) if dry_run else run(settings)
    return commands.show(answer, as_json=json)


def plan(settings: GateSettings) -> dict[str, Any]:
    """Return the evaluation to read, and the limits."""
    check_folder(Path(settings.output.folder), "output.folder")
    bands = {
        name: band.model_dump(exclude_none=True) for name, band in settings.gate.metrics.items()
    }
    return {"evaluation": settings.gate.evaluation, "metrics": bands}


def run(settings: GateSettings) -> dict[str, Any]:
    """Compare and record the metrics.

    Raises DifferenceError if one is outside the band, and UndecidedError if one may be.
    """
    folder = Path(settings.output.folder)
    check_folder(folder, "output.folder")
    metrics = check_metrics(settings.gate)
    serving = _check_serving(settings)
    failures = [metric for metric in metrics if not metric.passed]
    version = None if serving is None else serving.version
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "passed": not failures,
        "serving_version": version,
        "evaluation": settings.gate.evaluation,
        "metrics": [asdict(metric) for metric in metrics],
    }
    config.save(folder / GATE, record)
    if failures:
        raise _build_refusal(failures, version)
    if any(metric.limit is None for metric in metrics):
        log.logger.info("no model serves yet; only fixed limits were checked")
    return {"gate": str(folder / GATE), **record}


def _build_refusal(failures: list[GatedMetric], version: str | None) -> DifferenceError:
    first = min(failures, key=lambda metric: metric.undecided)
    more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
    keeps = "no model is promoted" if version is None else f"version {version} keeps serving"
    key = f"gate.metrics.'{first.name}'"
    reason = f"the new model, {keeps}: {first.describe_failure()}{more}"
    if first.undecided:
        remedy = f"evaluate more rows, or raise {key}.max_loss"
        return UndecidedError(f"the rows are too few to decide on {reason}", remedy)
    return DifferenceError(f"the gate refuses {reason}", f"improve the model, or change {key}")


def _check_serving(settings: GateSettings) -> ServingModel | None:
    """Return the registry's serving model, if any.

    Raises InconclusiveError if it is not the model that was evaluated, and SettingsError without a
    registry if `gate.serving` does not name an evaluated model.
    """
    options, table = settings.gate, read_serving_table(settings.gate)
    if settings.registry is None:
        _check_serving_name(options, [row["name"] for row in table["rows"]])
        return None
    serving = find_serving(settings.registry)
    evaluated = table["settings"]["models"].get(options.serving)
    if serving is None and evaluated is None:
        return None
    if serving is None or evaluated is None or Path(evaluated) != Path(serving.artifact):
        actual = "no model" if serving is None else f"version {serving.version}"
        problem = f"{actual} serves, but '{options.serving}' in the evaluation is {evaluated}"
        raise InconclusiveError(problem, "evaluate the serving model again")
    return serving


def _check_serving_name(options: GateOptions, names: list[str]) -> None:
    """Raise SettingsError if a comparison is asked for, and the model is not among the rows."""
    others = [name for name in names if options.serving_evaluation or name != options.new]
    is_expected = others or options.serving != GateOptions.model_fields["serving"].default
    compares = any(band.compares for band in options.metrics.values())
    if compares and is_expected and options.serving not in names:
        problem = f"gate.serving: the evaluation has no model '{options.serving}' to compare with"
        raise SettingsError(problem, choices.did_you_mean(options.serving, others))
