"""Finds the folder of a model by a run folder, a model folder or a Hugging Face Hub name."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path

from regauge.system.errors import SettingsError, first_line
from regauge.system.files import sha256, write_json
from regauge.system.json_files import read_json

CONFIG = "config.json"
STEP_KEY = "training_step"
"""Configuration key for a trained model's step."""
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""Files of a peft adapter, whose base model is in another folder."""
QUANTIZATION_KEYS = ("quantization_config", "compression_config")
"""Configuration keys of weights that are not plain numbers."""
GENERATION_CONFIG = "generation_config.json"
"""End tokens and decoding options for a model that generates text."""
MODEL_FILE_PATTERNS = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
"""Model files downloaded from the hub."""
TOKENIZER_FILE_PATTERNS = (
    CONFIG,
    *(f"{name}*" for name in ("tokenizer", "special", "added", "vocab", "merges", "chat")),
    "additional_chat_templates/*",
)
"""Tokenizer files to download; `config.json` is needed to convert some tokenizers."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "tokenizer.model")
"""A folder with any of these files contains a tokenizer."""
LOGIN_REMEDY = "run: hf auth login (or set HF_TOKEN), or name a local folder"
_LOCAL_ONLY = ContextVar("local_only", default=False)
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def final_model_dir(path: str) -> Path:
    """Return a run folder's final model, or the path itself if it is a model folder."""
    folder = Path(path)
    model = folder / "model"
    return model if (model / CONFIG).is_file() and not (folder / CONFIG).is_file() else folder


def loadable_name(path: str) -> str:
    """Return the name by which transformers loads a model: an absolute folder, or a hub name."""
    folder = final_model_dir(path)
    return str(folder.absolute()) if folder.exists() else path


def is_custom_module(folder: Path) -> bool:
    """Return whether a model folder holds a custom module's weights; its task builds the module."""
    return not read_json(folder / CONFIG, "copy the folder again").get("model_type")


def record_step(folder: Path, step: int) -> None:
    """Record the step of a model folder's weights in the configuration."""
    document = read_json(folder / CONFIG, "copy the folder again")
    write_json(folder / CONFIG, {**document, STEP_KEY: step})


def read_step(folder: Path) -> int | None:
    """Return the recorded step of a model folder's weights, or None."""
    step = read_json(folder / CONFIG, "copy the folder again").get(STEP_KEY)
    return step if isinstance(step, int) else None


@contextmanager
def local_only() -> Iterator[None]:
    """Disable downloads in this context; hub names resolve to local copies only."""
    token = _LOCAL_ONLY.set(True)
    try:
        yield
    finally:
        _LOCAL_ONLY.reset(token)


def resolve_model(path: str, *, fetch: bool = True) -> Path:
    """Return a path's model folder: a run's final model, the folder, or a hub download.

    A hub model is downloaded once per process, but not if `fetch` is false or in `local_only`.
    Raises SettingsError if the model is missing, quantized or an adapter, or if access to it is
    denied.
    """
    folder = final_model_dir(path)
    if not folder.exists() and _HUB_NAME.fullmatch(path):
        folder = _download(path, fetch=fetch and not _LOCAL_ONLY.get())
    if (folder / ADAPTER_CONFIG).is_file():
        refuse_adapter(folder, path)
    if not (folder / CONFIG).is_file():
        raise SettingsError(
            f"no model at '{path}': {'it has no' if folder.exists() else 'there is no'} {CONFIG}",
            f"name a folder with {CONFIG} and model.safetensors",
        )
    refuse_quantized(folder, path)
    return folder


def refuse_adapter(folder: Path, path: str) -> None:
    """Raise SettingsError for a peft adapter's folder; `path` names it in messages."""
    if any(folder.glob("model*.safetensors")):
        problem = f"'{path}' has a peft adapter next to a model"
        raise SettingsError(problem, "move one of them to another folder")
    problem = f"'{path}' is a peft adapter, which needs its base model"
    raise SettingsError(problem, f"run: regauge import {folder} --to OTHER, and use that folder")


def refuse_quantized(folder: Path, path: str) -> None:
    """Raise SettingsError if a folder's weights are quantized; `path` names it in messages."""
    document = read_json(folder / CONFIG, "copy the folder again")
    table = next((document[key] for key in QUANTIZATION_KEYS if document.get(key)), None)
    if table is not None:
        method = table.get("quant_method") if isinstance(table, dict) else None
        problem = f"the weights in '{path}' are quantized ({method or 'unknown method'})"
        raise SettingsError(problem, "name the model before its quantization")


def list_model_files(folder: Path) -> list[Path]:
    """Return the files a model is loaded from, sorted."""
    return sorted({path for pattern in MODEL_FILE_PATTERNS for path in folder.rglob(pattern)})


def hash_model(folder: Path) -> str:
    """Return a hash over names and hashes of the files a model is loaded from."""
    return combine_hashes(
        {str(path.relative_to(folder)): sha256(path) for path in list_model_files(folder)}
    )


def combine_hashes(hashes: Mapping[str, str]) -> str:
    """Return a model's hash, given path in the folder -> file SHA-256."""
    lines = (f"{name} {hashes[name]}\n" for name in sorted(hashes, key=Path))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def resolve_tokenizer(path: str, *, fetch: bool = True) -> Path:
    """Return a tokenizer folder: of a model, a run, a dataset, or a hub download.

    Raises SettingsError if a hub name cannot be resolved. A folder may lack a tokenizer.
    """
    folder = Path(path)
    if not folder.exists() and _HUB_NAME.fullmatch(path):
        fetch = fetch and not _LOCAL_ONLY.get()
        return _download(path, TOKENIZER_FILE_PATTERNS, "a tokenizer", fetch=fetch)
    candidates = (folder, folder / "model", folder / "tokenizer")
    return next(filter(has_tokenizer, candidates), folder)


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder contains a tokenizer."""
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


@cache
def _download(
    name: str,
    patterns: tuple[str, ...] = MODEL_FILE_PATTERNS,
    content: str = "weights",
    *,
    fetch: bool,
) -> Path:
    """Return a hub model's local copy; cached, so that a process uses one revision.

    `content` describes the files with these patterns, for messages.
    """
    from huggingface_hub import errors, snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        folder = snapshot_download(name, allow_patterns=list(patterns), local_files_only=not fetch)
    except errors.GatedRepoError:
        problem = f"hub model '{name}' is gated"
        raise SettingsError(problem, f"accept its terms on the hub, then {LOGIN_REMEDY}") from None
    except errors.RepositoryNotFoundError:
        problem = f"the hub has no public model '{name}'"
        raise SettingsError(problem, f"correct it; if it is private, {LOGIN_REMEDY}") from None
    except (errors.HfHubHTTPError, OSError, ValueError) as error:
        is_offline = isinstance(error, errors.LocalEntryNotFoundError)
        failure = "cannot be reached" if is_offline else f"failed: {first_line(error)}"
        reason = f"the hub {failure}" if fetch else "no copy from the hub"
        problem = f"there is no folder '{name}', and {reason}"
        raise SettingsError(problem, f"name a folder with {content}") from None
    return Path(folder)
