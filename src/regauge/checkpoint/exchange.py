"""Weights out: of a run and its checkpoints, in the forms that others load."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from regauge.checkpoint import folder as checkpoints
from regauge.checkpoint.loading import damage_of, newest
from regauge.checkpoint.tensors import read_into
from regauge.errors import DataError, SettingsError
from regauge.models import build as models
from regauge.models.reading import longest, reading
from regauge.processes import World

if TYPE_CHECKING:
    from torch import Tensor

Format = Literal["hf", "torch", "sentence-transformers"]
WEIGHT = "model."
"""Prefix of a weight's name in a checkpoint; twice, since the trained module holds the model."""


def export(model: Path, target: Path, form: Format, *, pooled: bool) -> Path:
    """Write a transformers folder in another form; return the file or folder that was written.

    `pooled` says that the model's vectors are means of length 1, which only one form can express.
    """
    make_way(target)
    if form == "torch":
        target.parent.mkdir(parents=True, exist_ok=True)
        torch.save(load_file(model / "model.safetensors"), target)
        return target
    shutil.copytree(model, target)
    if form == "sentence-transformers":
        if not pooled:
            shutil.rmtree(target)
            raise SettingsError(
                "this run did not train a text encoder",
                "export a run of task 'contrastive', or choose format hf or torch",
            )
        _describe_pooling(target)
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
    """Write the model of a checkpoint as a transformers folder, beside its final one's facts."""
    shutil.copytree(run / "model", target)
    weights = weights_at(run, step)
    final = load_file(target / "model.safetensors")
    if weights.keys() != final.keys():
        raise DataError(f"a checkpoint of {run} has other weights than its model", "name another")
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


def make_way(target: Path) -> None:
    """Remove an empty folder; raises SettingsError where there is anything else."""
    if target.exists() and (target.is_file() or any(target.iterdir())):
        raise SettingsError(f"{target} exists", "name another place with --to")
    if target.is_dir():
        target.rmdir()


def _describe_pooling(target: Path) -> None:
    """Add what sentence-transformers reads: mean pooling, then vectors of length 1."""
    config = json.loads((target / "config.json").read_text())
    parts = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    modules = [
        {
            "idx": number,
            "name": str(number),
            "path": path,
            "type": f"sentence_transformers.models.{kind}",
        }
        for number, (path, kind) in enumerate(parts)
    ]
    pooling = {
        "word_embedding_dimension": config["hidden_size"],
        "pooling_mode_mean_tokens": True,
        "pooling_mode_cls_token": False,
        "pooling_mode_max_tokens": False,
    }
    model = models.load(target)
    length = {"max_seq_length": longest(model, reading(model)), "do_lower_case": False}
    for path, _ in parts[1:]:
        (target / path).mkdir()
    _write(target / "modules.json", modules)
    _write(target / "1_Pooling" / "config.json", pooling)
    _write(target / "sentence_bert_config.json", length)
    _write(target / "config_sentence_transformers.json", {"similarity_fn_name": "cosine"})


def _write(path: Path, document: object) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n")
