"""Weights out: of a run and its checkpoints, in the forms that others load."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed.checkpoint as dcp

from regauge import config
from regauge.checkpoint import layout as checkpoints
from regauge.checkpoint.layout import check_free
from regauge.checkpoint.loading import damage_of, newest
from regauge.checkpoint.tensors import read_into
from regauge.errors import DataError, SettingsError
from regauge.models import architectures as models
from regauge.models import dual_encoder, heads, lora, sentence_transformers
from regauge.models import weights as folders
from regauge.models.hub import at
from regauge.models.init_weights import initial_weights
from regauge.models.settings import Model
from regauge.processes import World

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

Format = Literal["hf", "peft", "torch", "sentence-transformers"]
WEIGHT = "model."
"""Prefix of a weight's name in a checkpoint; twice, since the trained module holds the model."""


def export(model: Path, target: Path, form: Format) -> Path:
    """Write a transformers folder in another form; return the file or folder that was written."""
    adapter = model.with_name(lora.FOLDER)
    if form == "peft" and not adapter.is_dir():
        raise SettingsError("this run trained no adapters", "set model.lora, or export format hf")
    if form == "sentence-transformers" and not sentence_transformers.described(model):
        raise SettingsError(
            "this run did not train a text encoder",
            "export a run of task 'contrastive', or choose format hf or torch",
        )
    make_way(target)
    if form == "torch":
        target.parent.mkdir(parents=True, exist_ok=True)
        torch.save(folders.whole(model), target)
        return target
    shutil.copytree(adapter if form == "peft" else model, target)
    return target


def weights_at(run: Path, step: Literal["latest", "best"] | int) -> dict[str, Tensor]:
    """Return the weights of a run's checkpoint by the model's own names, whole, fp32."""
    root = run / "checkpoints"
    if step == "latest":
        path = newest(root, World())
    elif step == "best":
        best = checkpoints.best(root)
        path = root / best["name"] if best else None
    else:
        path = root / checkpoints.name_of(int(step))
    if path is None or not path.is_dir():
        kept = ", ".join(map(str, checkpoints.steps(root))) or "none"
        raise SettingsError(f"{run} has no checkpoint '{step}'", f"kept steps: {kept}")
    damage = damage_of(path, World())
    if damage:
        raise DataError(damage, "name another step")
    found = dcp.HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata
    wanted = {
        name: torch.empty(facts.size)
        for name, facts in found.items()
        if name.startswith(WEIGHT) and hasattr(facts, "size")
    }
    read_into(path, wanted)
    return {name.removeprefix(WEIGHT).removeprefix(WEIGHT): wanted[name] for name in wanted}


def moment(run: Path, step: Literal["latest", "best"] | int, target: Path) -> Path:
    """Write the model of a checkpoint as a transformers folder, beside its final one's facts.

    What was not trained is in no checkpoint: it is that of the final model. Adapters are merged in
    it, and written beside it.
    """
    final, tables = run / "model", config.read(run / "run.json")
    if not isinstance(tables["task"], dict):
        raise SettingsError(
            f"{run} trained several tasks, and its checkpoints hold the weights of all",
            "take a final model: that of the first task, or tasks/<name>/model",
        )
    settings, weights = config.build(Model, tables["model"]), weights_at(run, step)
    head = {name: weights.pop(name) for name in list(weights) if heads.of_head(name)}
    second = {
        name.removeprefix(dual_encoder.OF_DOCUMENTS): weights.pop(name)
        for name in list(weights)
        if dual_encoder.of_documents(name)
    }
    shutil.copytree(final, target, ignore=shutil.ignore_patterns("*.safetensors*"))
    if head:
        heads.write_head(target, {**folders.whole_file(final / heads.HEAD), **head})
    beside = target.with_name(lora.FOLDER)
    _write_moment((final, target, beside), weights, settings, tables["seed"])
    if dual_encoder.there(final):
        place, own = dual_encoder.FOLDER, _of_documents(settings)
        inside = (final / place, target / place, beside / place)
        _write_moment(inside, second, own, tables["seed"])
    return target


def _write_moment(
    places: tuple[Path, Path, Path], weights: dict[str, Tensor], settings: Model, seed: int
) -> None:
    """Write a model with the weights of a checkpoint: from its final folder, to its own.

    The third place is for its adapters.
    """
    final, target, beside = places
    adapted, plain = _adapted(final, settings), folders.stored(final)
    known = set(_adapters(adapted) if adapted else plain)
    if not weights.keys() <= known or (adapted and weights.keys() != known):
        raise DataError(f"a checkpoint has other weights than {final}", "name another")
    if settings.lora is None or adapted is None:
        every = ((name, weights[name] if name in weights else plain[name][:]) for name in plain)
        folders.write(target, every)
        return
    folders.write(target, lora.merged(initial_weights(adapted, settings, seed), weights))
    blocks = models.blocks(adapted)
    lora.save(beside, adapted, settings.lora, weights, blocks=blocks, base=settings.path)


def _of_documents(settings: Model) -> Model:
    """Return the settings of a model as its second encoder read them."""
    if settings.path is None:
        return settings
    folder = dual_encoder.folder_of(at(settings.path), dual_encoder.FOLDER)
    return settings.model_copy(update={"path": str(folder)})


def _adapted(final: Path, settings: Model) -> PreTrainedModel | None:
    """Return the model of a run with its adapters, on the meta device; None where it has none."""
    if settings.lora is None:
        return None
    model = models.template(final)
    lora.install(model, models.blocks(model), settings.lora)
    return model


def _adapters(model: PreTrainedModel) -> list[str]:
    return [name for name, _ in model.named_parameters() if folders.adapting(name)]


def make_way(target: Path) -> None:
    """Remove an empty folder; raises SettingsError where there is anything else."""
    check_free(target)
    if target.is_dir():
        target.rmdir()
