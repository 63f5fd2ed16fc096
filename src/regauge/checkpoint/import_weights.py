"""Weights in: what others saved, as a folder that transformers loads.

A foreign pickle is opened in a process of its own, which calls nothing in it, and comes back as
safetensors; nothing else ever reads one.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file

from regauge.checkpoint.export_weights import make_way
from regauge.checkpoint.unpickle import FACTS
from regauge.errors import DataError, SettingsError
from regauge.log import logger
from regauge.models import architectures as models
from regauge.models import sentence_transformers
from regauge.models import weights as folders
from regauge.models.hub import CONFIG
from regauge.worker import WorkerLimits, run_worker

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from regauge.models.settings import Model

UNPICKLE = "regauge.checkpoint.unpickle"
LIMIT_SECONDS = 3600
"""For one origin: 140 GB at 40 MB/s."""
SHARD = "mp_rank_*_model_states.pt"
"""DeepSpeed's file of a tensor-parallel rank's weights, one for each."""
DEFAULT_VOCABULARY = 1
"""For a state dict whose table does not say; the first shape that differs is then named."""


def take_in(
    origin: Path,
    target: Path,
    settings: Model | None,
    *,
    head: models.Head = "none",
    prefix: str | None = None,
    tokenizer: Path | None = None,
) -> dict[str, Any]:
    """Write foreign weights as a transformers folder; return what was found.

    `settings` give the dimensions where the origin does not, `prefix` what precedes the weights'
    names where it cannot be found out. Raises SettingsError and DataError for what does not fit.
    """
    make_way(target)
    weights_file = find(origin, settings)
    if weights_file is None or settings is None:
        model = _loaded(origin)
        tokenizer = tokenizer or origin
    else:
        vocabulary = settings.config.get("vocab_size", DEFAULT_VOCABULARY)
        model, _ = models.build(settings, head, vocabulary, seed=0)
        adopt(foreign(weights_file, list(model.state_dict()), prefix), model, origin)
    config = model.config
    config.architectures = [models.class_name(model)]
    weights = ((name, value.detach()) for name, value in model.named_parameters())
    folders.save(target, config, weights, tokenizer or target)
    if sentence_transformers.described(origin) and not models.classifies(model):
        sentence_transformers.copy(origin, target)
    count = sum(value.numel() for value in model.parameters())
    return {"written": str(target), "class": models.class_name(model), "parameters": count}


def find(origin: Path, settings: Model | None) -> Path | None:
    """Return what holds the weights of an origin; None for a transformers folder, which says all.

    Raises SettingsError where nothing says the architecture, and DataError for a folder of an
    unknown kind, or one of DeepSpeed in which no file holds them whole.
    """
    if not origin.exists():
        raise SettingsError(f"no weights at {origin}", "name a folder or a file of weights")
    if (origin / CONFIG).is_file() and folders.weight_files(origin):
        return None
    found = _weights_in(origin)
    if settings is None:
        raise SettingsError(
            f"{origin} does not say its architecture",
            "set model.architecture and model.config, with vocab_size",
        )
    return found


def _weights_in(origin: Path) -> Path:
    plain = folders.weight_files(origin) and not folders.pickled(origin)
    if origin.is_file() or (origin / FACTS).is_file() or plain:
        return origin
    tag = origin / "latest"
    folder = origin / tag.read_text().strip() if tag.is_file() else origin
    spread, shards = list(folder.glob(f"zero_pp_rank_*_{SHARD}")), sorted(folder.glob(SHARD))
    if spread:
        way = "run there: python zero_to_fp32.py . weights --safe_serialization, and import that"
        raise DataError(f"{origin} has its weights spread over the ranks of ZeRO-3", way)
    if len(shards) > 1:
        raise DataError(
            f"{origin} has its weights spread over {len(shards)} tensor-parallel ranks",
            "merge them with the converter of what trained them",
        )
    if not shards:
        raise DataError(
            f"{origin} has no weights that are known",
            "name a file, or a folder of transformers, DeepSpeed or torch.distributed.checkpoint",
        )
    return shards[0]


def foreign(origin: Path, names: list[str], prefix: str | None) -> dict[str, Tensor]:
    """Return an origin's tensors by a model's names, opened in a process of its own."""
    with tempfile.TemporaryDirectory() as scratch:
        target = Path(scratch) / folders.WHOLE
        _unpickled(origin, target, names, prefix)
        weights = load_file(target)
    halves = {value.dtype for value in weights.values()} & {torch.bfloat16, torch.float16}
    if halves:
        kind = str(halves.pop()).removeprefix("torch.")
        logger.warning("%s holds %s: what its optimizer kept in fp32 is not there", origin, kind)
    return weights


def adopt(weights: dict[str, Tensor], model: torch.nn.Module, origin: Path) -> None:
    """Load weights into a model; raises DataError that names the first misfit."""
    own = model.state_dict()
    tied = set(own) - {name for name, _ in model.named_parameters()}
    missing = sorted(set(own) - set(weights) - tied)
    strange = sorted(set(weights) - set(own))
    if pooling := [name for name in strange if name.startswith(models.POOLING)]:
        logger.warning("%s: '%s' is left out: no task trains a pooling layer", origin, pooling[0])
        strange = [name for name in strange if name not in pooling]
    for name in sorted(set(own) & set(weights)):
        if own[name].shape != weights[name].shape:
            shapes = f"{tuple(weights[name].shape)} there, {tuple(own[name].shape)} in the model"
            raise DataError(f"{origin}: '{name}' is {shapes}", "set model.config to its dimensions")
    if missing or strange:
        problem = f"lacks '{missing[0]}'" if missing else f"has '{strange[0]}', which is unknown"
        raise DataError(
            f"{origin} {problem} ({len(missing)} missing, {len(strange)} unknown)",
            "set model.architecture and the head to those that it was saved from",
        )
    model.load_state_dict(weights, strict=False)


def _loaded(origin: Path) -> PreTrainedModel:
    """Return the model of a transformers folder, whatever form its weights have."""
    if not folders.pickled(origin):
        return models.load(origin)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        shutil.copy(origin / CONFIG, folder)
        _unpickled(origin, folder / folders.WHOLE, None, None)
        return models.load(folder)


def _unpickled(origin: Path, target: Path, names: list[str] | None, prefix: str | None) -> None:
    request = {"origin": str(origin), "target": str(target), "names": names, "prefix": prefix}
    with tempfile.TemporaryDirectory() as folder:
        ended = run_worker(UNPICKLE, request, Path(folder), WorkerLimits(total=LIMIT_SECONDS))
    if ended.code is None:
        raise DataError(f"{origin} took too long to open", "save its state dict anew")
    if ended.code:
        reason = ended.last_lines[-1] if ended.last_lines else ended.problem
        raise DataError(
            f"{origin} is not taken in: {reason}",
            "correct [model] or set origin.prefix, or torch.save(model.state_dict(), …) anew",
        )
