"""Import weights from transformers, DeepSpeed, DCP or a state dict.

For example:

    $ regauge import bert-base --to out/start
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from regauge import commands, config
from regauge.config import Settings
from regauge.models.settings import Model
from regauge.system.errors import find_refusal
from regauge.system.files import check_free

OUTPUT = "weights.to"


class ImportedWeights(Settings):
    """Weights to import."""

    path: str
    """Weight file, or a transformers, DeepSpeed or torch.distributed.checkpoint folder."""
    to: str
    """Folder to write, which a run then names as `model.path`."""
    head: Literal["none", "masked", "causal"] = "none"
    """Model head in a state dict."""
    prefix: str | None = None
    """Weight name prefix, such as `ema.`, if the file contains several sets."""
    tokenizer: str | None = None
    """Tokenizer folder for a state dict."""


class ImportSettings(Settings):
    """Weight import settings."""

    weights: ImportedWeights
    """Weights to import."""
    model: Model | None = None
    """Architecture and dimensions of a state dict, which does not contain them."""


ROOT = ImportSettings


def main(
    run_file: Annotated[Path, Parameter(help="Weight folder or file, or run file (.toml).")],
    *overrides: commands.Override,
    to: Annotated[Path | None, Parameter(help="Folder to write.")] = None,
    dry_run: commands.DryRun = False,
    json: commands.AsJson = False,
) -> dict[str, Any]:
    """Check the weights and write them as a folder from which a run can start.

    For example:

        >>> regauge.import_("bert-base", to="out/start")
    """
    assignments = () if to is None else (f"weights.to={to}",)
    overrides = (*overrides, *assignments)
    if run_file.suffix in commands.RUN_FILE_SUFFIXES:
        settings = commands.load_settings(ImportSettings, run_file, overrides)
    else:
        tables = config.apply_overrides(
            {"weights": {"path": str(run_file)}}, overrides, ImportSettings
        )
        settings = config.build(ImportSettings, tables, (), str(run_file))
    if dry_run:
        return commands.show(plan(settings), as_json=json)
    return commands.show(run(settings), as_json=json)


def plan(settings: ImportSettings) -> dict[str, Any]:
    """Return the paths that would be read and written, and the refusal if the target exists.

    Raises SettingsError for weights that cannot be read.
    """
    from regauge.training.checkpoint import import_weights

    path = Path(settings.weights.path)
    refusal = find_refusal(lambda: check_free(Path(settings.weights.to)))
    import_weights.find_weights(path, settings.model)
    return {"source": str(path), "path": settings.weights.to, **refusal}


def run(settings: ImportSettings) -> dict[str, Any]:
    """Read the weights, check them against the model and write the folder."""
    from regauge.training.checkpoint import import_weights

    weights = settings.weights
    return import_weights.import_weights(
        Path(weights.path),
        Path(weights.to),
        settings.model,
        head=weights.head,
        prefix=weights.prefix,
        tokenizer=Path(weights.tokenizer) if weights.tokenizer else None,
    )
