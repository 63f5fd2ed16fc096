"""Imports third-party weights as a transformers folder.

A third-party pickle is opened in a separate process, which calls nothing in it and returns its
tensors as safetensors. No other code reads a pickle.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file

from regauge.models import architectures, sentence_transformers
from regauge.models.weight_files import WEIGHTS_FILE, find_weight_files, has_pickled_weights
from regauge.models.weights import (
    POOLER_PREFIX,
    match_names,
    save_model_folder,
    starts_untied,
    untie,
)
from regauge.system.errors import DataError, SettingsError
from regauge.system.files import check_free, stage_output
from regauge.system.hub import (
    ADAPTER_CONFIG,
    CONFIG,
    GENERATION_CONFIG,
    has_tokenizer,
    refuse_quantized,
)
from regauge.system.log import logger
from regauge.system.worker import WorkerLimits, run_worker
from regauge.training.checkpoint.import_adapter import load_merged
from regauge.training.checkpoint.unpickle import METADATA_FILE

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from regauge.models.settings import Model

UNPICKLE = "regauge.training.checkpoint.unpickle"
_EXCEPTION_CLASS = re.compile(r"^[\w.]+(Error|Exception): ")
"""Start of a traceback's last line."""
TIMEOUT_SECONDS = 3600
"""Limit per origin: enough for 140 GB at 40 MB/s."""
SHARD = "mp_rank_*_model_states.pt"
"""DeepSpeed's weight file for a tensor-parallel rank."""
DEFAULT_VOCAB_SIZE = 1
"""Used if model.config lacks vocab_size; then the first shape that differs is reported."""


def import_weights(
    origin: Path,
    target: Path,
    settings: Model | None,
    *,
    head: architectures.HeadKind = "none",
    prefix: str | None = None,
    tokenizer: Path | None = None,
) -> dict[str, Any]:
    """Write third-party weights as a transformers folder; return a summary.

    `settings` give the dimensions if the origin does not, and `prefix` the weight name prefix if it
    cannot be found. Raises SettingsError or DataError for weights that do not fit.
    """
    check_free(target)
    weights_file, base = find_weights(origin, settings), origin
    if weights_file is None or settings is None:
        model, base = _load_model(origin)
        tokenizer = tokenizer or (origin if has_tokenizer(origin) else base)
    else:
        vocab_size = settings.config.get("vocab_size", DEFAULT_VOCAB_SIZE)
        model, _ = architectures.build_model(settings, head, vocab_size, seed=0)
        foreign = read_foreign_weights(weights_file, list(model.state_dict()), prefix)
        if starts_untied(model, foreign, str(origin)):
            untie(model)
        load_into_model(foreign, model, origin)
    config = model.config
    config.architectures = [architectures.class_name(model)]
    weights = ((name, value.detach()) for name, value in model.named_parameters())
    is_encoder = sentence_transformers.is_sentence_transformer(origin)
    with stage_output(target) as output:
        save_model_folder(output, config, weights, tokenizer or output)
        if (base / GENERATION_CONFIG).is_file():
            shutil.copyfile(base / GENERATION_CONFIG, output / GENERATION_CONFIG)
        if is_encoder and not architectures.is_classifier(model):
            sentence_transformers.copy_description(origin, output)
    count = sum(value.numel() for value in model.parameters())
    class_name = architectures.class_name(model)
    return {"path": str(target), "model_class": class_name, "parameters": count}


def find_weights(origin: Path, settings: Model | None) -> Path | None:
    """Return the weight file or folder in an origin; None for a transformers folder.

    Raises SettingsError if the architecture is unknown, and DataError for an unknown folder format,
    or a DeepSpeed folder in which no file has the whole weights.
    """
    if not origin.exists():
        raise SettingsError(f"no weights at {origin}", "name a folder or a file of weights")
    if (origin / ADAPTER_CONFIG).is_file():
        return None
    if (origin / CONFIG).is_file():
        refuse_quantized(origin, str(origin))
    if (origin / CONFIG).is_file() and find_weight_files(origin):
        return None
    weights = _find_weights_in_folder(origin)
    if settings is None:
        raise SettingsError(
            f"{origin} has no {CONFIG}, so its architecture is unknown",
            "set model.architecture and model.config, with vocab_size",
        )
    return weights


def _find_weights_in_folder(origin: Path) -> Path:
    has_safetensors = find_weight_files(origin) and not has_pickled_weights(origin)
    if origin.is_file() or (origin / METADATA_FILE).is_file() or has_safetensors:
        return origin
    tag = origin / "latest"
    folder = origin / tag.read_text(encoding="utf-8").strip() if tag.is_file() else origin
    zero_shards = list(folder.glob(f"zero_pp_rank_*_{SHARD}"))
    shards = sorted(folder.glob(SHARD))
    if zero_shards:
        raise DataError(
            f"the weights in {origin} are sharded over the ranks of ZeRO-3",
            "run there: python zero_to_fp32.py . weights --safe_serialization, and import that",
        )
    if len(shards) > 1:
        raise DataError(
            f"the weights in {origin} are sharded over {len(shards)} tensor-parallel ranks",
            "merge them with the converter of the library that trained them",
        )
    if not shards:
        raise DataError(
            f"{origin} has no weights of a known format",
            "name a file, or a folder of transformers, DeepSpeed or torch.distributed.checkpoint",
        )
    return shards[0]


def read_foreign_weights(origin: Path, names: list[str], prefix: str | None) -> dict[str, Tensor]:
    """Read tensors under a model's weight names; a separate process opens the origin."""
    with tempfile.TemporaryDirectory() as scratch:
        target = Path(scratch) / WEIGHTS_FILE
        _unpickle(origin, target, names, prefix)
        weights = load_file(target)
    half_dtypes = {value.dtype for value in weights.values()} & {torch.bfloat16, torch.float16}
    if half_dtypes:
        dtype = str(half_dtypes.pop()).removeprefix("torch.")
        logger.warning("%s holds %s; the fp32 weights of its optimizer are missing", origin, dtype)
    return weights


def load_into_model(foreign: dict[str, Tensor], model: PreTrainedModel, origin: Path) -> None:
    """Load weights into a model; raises DataError for the first weight that does not fit."""
    weights = {name: foreign[stored] for stored, name in match_names(model, foreign).items()}
    state = model.state_dict()
    tied = set(state) - {name for name, _ in model.named_parameters()}
    missing = sorted(set(state) - set(weights) - tied)
    unknown = sorted(set(weights) - set(state))
    pooler = [name for name in unknown if name.startswith(POOLER_PREFIX)]
    if pooler:
        logger.warning("%s: ignoring '%s'; no task trains a pooling layer", origin, pooler[0])
        unknown = [name for name in unknown if name not in pooler]
    for name in sorted(set(state) & set(weights)):
        if state[name].shape != weights[name].shape:
            raise DataError(
                f"{origin}: '{name}' has shape {tuple(weights[name].shape)}, "
                f"the model {tuple(state[name].shape)}",
                "set model.config to its dimensions",
            )
    if missing or unknown:
        problem = f"lacks '{missing[0]}'" if missing else f"has '{unknown[0]}', which is unknown"
        raise DataError(
            f"{origin} {problem} ({len(missing)} missing, {len(unknown)} unknown)",
            "set model.architecture and the head to those that it was saved from",
        )
    model.load_state_dict(weights, strict=False)


def _load_model(origin: Path) -> tuple[PreTrainedModel, Path]:
    """Return the model in a folder, and the folder of its base model."""
    if (origin / ADAPTER_CONFIG).is_file():
        return load_merged(origin)
    if not has_pickled_weights(origin):
        return architectures.load_model(origin), origin
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        shutil.copy(origin / CONFIG, folder)
        _unpickle(origin, folder / WEIGHTS_FILE, None, None)
        return architectures.load_model(folder), origin


def _unpickle(origin: Path, target: Path, names: list[str] | None, prefix: str | None) -> None:
    """Convert an origin to safetensors in a separate process; raises DataError if that fails."""
    request = {"origin": str(origin), "target": str(target), "names": names, "prefix": prefix}
    with tempfile.TemporaryDirectory() as folder:
        limits = WorkerLimits(total=TIMEOUT_SECONDS)
        worker_exit = run_worker(UNPICKLE, request, Path(folder), limits)
    if worker_exit.code is None:
        raise DataError(f"{origin} took too long to open", "save its state dict again")
    if worker_exit.code:
        lines = worker_exit.last_lines
        reason = _EXCEPTION_CLASS.sub("", lines[-1]) if lines else worker_exit.problem
        raise DataError(
            f"{origin} cannot be imported: {reason}",
            "correct [model] or set weights.prefix, or save it with "
            "torch.save(model.state_dict(), …)",
        )
