"""Exports run or checkpoint weights to other libraries' formats."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed.checkpoint as dcp

from regauge import config
from regauge.models import dual_encoder, heads, lora, sentence_transformers
from regauge.models.architectures import (
    add_adapters,
    build_template,
    find_blocks,
    transformers_class,
)
from regauge.models.init_weights import build_initial_weights
from regauge.models.settings import Model
from regauge.models.weights import list_weights, read_weight_file, read_weights, write_weights
from regauge.run_folders import checkpoint_files
from regauge.system.errors import DataError, SettingsError
from regauge.system.files import check_files, stage_output
from regauge.system.hub import is_custom_module, record_step, resolve_model
from regauge.system.processes import World
from regauge.training.checkpoint.loading import find_newest, verify_checkpoint
from regauge.training.checkpoint.tensors import load_tensors

if TYPE_CHECKING:
    from torch import Tensor

WeightFormat = Literal["hf", "peft", "torch", "sentence-transformers"]
WEIGHT_PREFIX = "model."
"""Weight name prefix in checkpoints; it occurs twice, because the trained module wraps the
model."""


def export_model(model: Path, target: Path, weight_format: WeightFormat) -> Path:
    """Write a transformers folder in another format; return the written file or folder.

    Raises SettingsError if the model lacks adapters, is not a text encoder or is a custom module,
    as the format requires.
    """
    if weight_format == "hf" and is_custom_module(model):
        problem = "this run trained a custom module, which transformers cannot load"
        raise SettingsError(problem, "export an artifact, or choose format torch")
    adapter = model.with_name(lora.ADAPTER_FOLDER)
    if weight_format == "peft":
        lora.check_exportable(adapter)
    is_encoder = sentence_transformers.is_sentence_transformer(model)
    if weight_format == "sentence-transformers" and not is_encoder:
        raise SettingsError(
            "this run did not train a text encoder",
            "export a run of a task that trains vectors, or choose format hf or torch",
        )
    with stage_output(target) as output:
        if weight_format == "torch":
            torch.save(read_weights(model), output)
        else:
            source = adapter if weight_format == "peft" else model
            check_files(source, "copy the folder again")
            shutil.copytree(source, output)
    return target


def find_checkpoint(run: Path, step: Literal["latest", "best"] | int) -> Path:
    """Return a whole checkpoint.

    Raises SettingsError if this step does not have one, and DataError if it is damaged.
    """
    root = run / checkpoint_files.CHECKPOINTS
    if step == "latest":
        path = find_newest(root, World())
    elif step == "best":
        best = checkpoint_files.read_best(root)
        path = root / best["checkpoint"] if best else None
    else:
        path = root / checkpoint_files.checkpoint_name(int(step))
    if path is None or not path.is_dir():
        raise checkpoint_files.build_missing_error(root, step, "export.step")
    damage = verify_checkpoint(path, World())
    if damage:
        raise DataError(damage, "choose another step")
    return path


def read_checkpoint_weights(path: Path) -> dict[str, Tensor]:
    """Read a checkpoint's weights, whole and in fp32, under the model's names."""
    metadata = dcp.HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata
    weights = {
        name: torch.empty(facts.size)
        for name, facts in metadata.items()
        if name.startswith(WEIGHT_PREFIX) and hasattr(facts, "size")
    }
    load_tensors(path, weights)
    return {
        name.removeprefix(WEIGHT_PREFIX).removeprefix(WEIGHT_PREFIX): weights[name]
        for name in weights
    }


def find_step(run: Path, step: Literal["latest", "best"] | int) -> int:
    """Return a step number. Raises SettingsError if the step does not have a checkpoint."""
    return int(find_checkpoint(run, step).name.rpartition("-")[2])


def export_checkpoint(run: Path, step: Literal["latest", "best"] | int, target: Path) -> Path:
    """Write a checkpoint's model as a transformers folder.

    Configuration, tokenizer and frozen weights come from the run's final model, because checkpoints
    do not contain them. Adapters are merged, and also written next to `target`.
    """
    final, tables = run / "model", config.read_saved_run(run)
    if not isinstance(tables["task"], dict):
        raise SettingsError(
            f"{run} trained several tasks, and its checkpoints contain the weights of all",
            "export a final model instead: <run>/model, or <run>/tasks/<name>/model",
        )
    settings = config.build(Model, tables["model"])
    checkpoint = find_checkpoint(run, step)
    weights = read_checkpoint_weights(checkpoint)
    head = {name: weights.pop(name) for name in list(weights) if heads.is_head_weight(name)}
    document_weights = {
        name.removeprefix(dual_encoder.DOCUMENT_PREFIX): weights.pop(name)
        for name in list(weights)
        if dual_encoder.is_document_weight(name)
    }
    check_files(final, "copy the folder again")
    shutil.copytree(final, target, ignore=shutil.ignore_patterns("*.safetensors*", "README.md"))
    record_step(target, checkpoint_files.read_state(checkpoint)["step"])
    if head:
        heads.write_head(target, {**read_weight_file(final / heads.HEAD_FILE), **head})
    adapters = target.with_name(lora.ADAPTER_FOLDER)
    _write_model((final, target, adapters), weights, settings, tables["seed"])
    if dual_encoder.has_document_encoder(final):
        name = dual_encoder.DOCUMENT_ENCODER
        folders = (final / name, target / name, adapters / name)
        document_settings = _resolve_document_settings(settings)
        _write_model(folders, document_weights, document_settings, tables["seed"])
    return target


def _write_model(
    folders: tuple[Path, Path, Path], weights: dict[str, Tensor], settings: Model, seed: int
) -> None:
    """Write a model with a checkpoint's weights.

    `folders` are the run's final model, the target, and the target for adapters. Raises DataError
    if checkpoint and final model have different weights.
    """
    final, target, adapters = folders
    model, final_weights = None, list_weights(final)
    known = set(final_weights)
    if settings.lora is not None:
        model = build_template(final, settings)
        add_adapters(model, settings.lora)
        known = {name for name, value in model.named_parameters() if value.requires_grad}
    if not weights.keys() <= known or (model and weights.keys() != known):
        raise DataError(f"a checkpoint has other weights than {final}", "choose another step")
    if settings.lora is None or model is None:
        write_weights(
            target,
            (
                (name, weights[name] if name in weights else final_weights[name][:])
                for name in final_weights
            ),
        )
        return
    initial = build_initial_weights(model, settings, seed)
    write_weights(target, lora.merge_adapters(initial, weights))
    blocks = find_blocks(model)
    lora.save_adapters(
        adapters,
        model,
        settings,
        weights,
        blocks=blocks,
        model_class=transformers_class(model),
        merged=target,
    )


def _resolve_document_settings(settings: Model) -> Model:
    """Return the settings that built the model's document encoder."""
    if settings.path is None:
        return settings
    model = resolve_model(settings.path)
    folder = dual_encoder.encoder_folder(model, dual_encoder.DOCUMENT_ENCODER)
    return settings.model_copy(update={"path": str(folder)})
