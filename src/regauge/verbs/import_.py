"""Take in foreign weights: of transformers, torch, DeepSpeed or a plain state dict."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from regauge import config, verbs
from regauge.checkpoint.layout import check_free
from regauge.config import Settings
from regauge.errors import find_refusal
from regauge.models.settings import Model

OUTPUT = "origin.to"


class Origin(Settings):
    """What is taken in."""

    path: str
    """A file of weights, or a folder: transformers, DeepSpeed, torch.distributed.checkpoint."""
    to: str
    """Folder to write; `model.path` then names it."""
    head: Literal["none", "masked", "causal"] = "none"
    """The head that a state dict was saved with."""
    prefix: str | None = None
    """What precedes the weights' names, such as `ema.`, where more than one set is there."""
    tokenizer: str | None = None
    """Folder of the tokenizer that belongs to a state dict."""


class Import(Settings):
    """Everything about an import."""

    origin: Origin
    """What is taken in."""
    model: Model | None = None
    """Architecture and dimensions of a state dict, which does not say them itself."""


ROOT = Import


def main(
    run_file: Annotated[Path, Parameter(help="folder or file of weights, or run file (.toml)")],
    *overrides: verbs.Override,
    to: Annotated[Path | None, Parameter(help="folder to write")] = None,
    dry_run: verbs.DryRun = False,
    json: verbs.AsJson = False,
) -> dict[str, Any]:
    """Check foreign weights and write them as a folder that a run starts from."""
    given = () if to is None else (f"origin.to={to}",)
    if run_file.suffix in {".toml", ".json"}:
        settings = verbs.load(Import, run_file, (*overrides, *given))
    else:
        tables = config.override({"origin": {"path": str(run_file)}}, (*overrides, *given))
        settings = config.build(Import, tables, (), str(run_file))
    return verbs.show(plan(settings) if dry_run else run(settings), as_json=json)


def plan(settings: Import) -> dict[str, Any]:
    """Return what would be read and written, and why it would not be when something is there.

    Raises SettingsError for weights that cannot be read.
    """
    from regauge.checkpoint import import_weights

    path = Path(settings.origin.path)
    refusal = find_refusal(lambda: check_free(Path(settings.origin.to)))
    import_weights.find(path, settings.model)
    return {"path": str(path), "to": settings.origin.to, **refusal}


def run(settings: Import) -> dict[str, Any]:
    """Read the weights, check them against the model, and write the folder."""
    from regauge.checkpoint import import_weights

    origin = settings.origin
    return import_weights.take_in(
        Path(origin.path),
        Path(origin.to),
        settings.model,
        head=origin.head,
        prefix=origin.prefix,
        tokenizer=Path(origin.tokenizer) if origin.tokenizer else None,
    )
