"""Compiled graphs that persist between runs, under a root that the user named.

    <root>/<key>/entry.json    what the graphs are for, the hash of every file, how long they took
    <root>/<key>/graphs/       what the device's compiler keeps

Graphs are code. What is in no list of hashes, or is not what its hash says, is removed before a
compiler sees it, and made again. No torch here where entries are only listed or copied.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import shutil
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge import choices
from regauge.checkpoint.layout import digest
from regauge.config import FORMAT, dump
from regauge.errors import DataError
from regauge.files import write_json
from regauge.log import logger

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn

    from regauge.processes import World
    from regauge.training.settings import Training

ENTRY, GRAPHS = "entry.json", "graphs"
KEY_DIGITS = 16
Facts = dict[str, Any]


@dataclass(frozen=True)
class Entry:
    """The graphs of one kind of run."""

    folder: Path
    facts: Facts
    first: bool
    """Whether this process writes the list."""

    def seal(self, seconds: float) -> float:
        """List every graph with its hash; `seconds` is what compiling took in this process.

        Return the longest that it ever took: what the graphs save who finds them.
        """
        if not self.first:
            return 0.0
        took: float = max(seconds, (read(self.folder) or {}).get("seconds", 0.0))
        files = {name: digest(self.folder / GRAPHS / name) for name in _names(self.folder)}
        write_json(
            self.folder / ENTRY,
            {"format": FORMAT, "facts": self.facts, "seconds": round(took, 3), "files": files},
        )
        return took

    @property
    def graphs(self) -> Path:
        """The folder that the compiler reads and writes."""
        return self.folder / GRAPHS


def facts(
    settings: Training, module: nn.Module, ladders: Sequence[tuple[int, ...]], world: World
) -> Facts:
    """Return everything that decides which graphs a run has; each task has its own lengths."""
    accelerator = settings.accelerator
    inner: Any = module.model
    execution = settings.execution
    return {
        "versions": {name: version(name) for name in ("regauge", "torch", "transformers")},
        "code": _code(inner),
        "model": {**inner.config.to_dict(), "dropout": settings.model.dropout},
        "lora": dump(settings.model.lora) if settings.model.lora else None,
        "tasks": [
            {
                "task": dump(aim.task),
                "microbatch_rows": aim.batch.microbatch_rows,
                "microbatches": -(-aim.batch.microbatches // world.size),
                "lengths": list(ladder),
            }
            for aim, ladder in zip(settings.task_configs, ladders, strict=True)
        ],
        "accelerator": dump(accelerator) if accelerator else None,
        "target": sorted(accelerator.features()) if accelerator else [],
        "strategy": dump(settings.strategy) if settings.strategy else None,
        "precision": execution.precision,
        "compile": execution.compile,
        "recomputed": execution.activation_checkpointing,
        "optimizer": settings.optimizer.kind,
        "clip": settings.optimizer.clip_norm,
        "evaluation_rows": settings.evaluation.microbatch_rows,
        "processes": world.size,
    }


def open_entry(root: Path, found: Facts, world: World) -> Entry:
    """Return the entry of a kind of run, its files verified; every process calls this."""
    text = json.dumps(found, sort_keys=True, default=str)
    key = hashlib.sha256(text.encode()).hexdigest()[:KEY_DIGITS]
    entry = Entry(root / key, json.loads(text), world.first)
    if world.first:
        entry.graphs.mkdir(parents=True, exist_ok=True)
        if removed := _purge(entry.folder):
            logger.warning("%s: made again, not what was written: %s", entry.folder, removed)
    if world.size > 1:
        import torch.distributed as dist

        dist.barrier()
    return entry


def entries(root: Path) -> list[Entry]:
    """Return the entries under a root that have a list."""
    return [Entry(folder, document["facts"], first=True) for folder, document in _lists(root)]


def listed(root: Path) -> list[dict[str, Any]]:
    """Return the entries under a root, each with what it is for and its size."""
    rows = []
    for folder, document in _lists(root):
        files, known = document.get("files", {}), document.get("facts", {})
        tasks = known.get("tasks", ())
        words = (
            (known.get("accelerator") or {}).get("kind"),
            known.get("precision"),
            " and ".join(each["task"]["kind"] for each in tasks),
            known.get("model", {}).get("model_type"),
        )
        rows.append(
            {
                "key": folder.name,
                "what": " ".join(str(word) for word in words),
                "lengths": ", ".join(str(length) for each in tasks for length in each["lengths"]),
                "files": len(files),
                "mb": round(sum(file["bytes"] for file in files.values()) / 1e6, 1),
                "seconds": document.get("seconds"),
            }
        )
    return rows


def read(folder: Path) -> dict[str, Any] | None:
    """Return the list of an entry; None where there is none, or none that can be read."""
    try:
        document: dict[str, Any] = json.loads((folder / ENTRY).read_text())
    except (OSError, ValueError):
        return None
    return document


def _lists(root: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the folders under a root whose list can be read, with it."""
    for path in sorted(root.glob(f"*/{ENTRY}")):
        if document := read(path.parent):
            yield path.parent, document


def copy(source: str, target: str) -> int:
    """Copy the entries under one root to another, folders or object stores; return how many.

    What the target already has of an entry stays. Raises DataError where there is none to copy, or
    one that names files outside of its folder.
    """
    import fsspec

    here, origin = fsspec.url_to_fs(source)
    there, root = fsspec.url_to_fs(target)
    lists = here.glob(f"{origin.rstrip('/')}/*/{ENTRY}")
    if not lists:
        raise DataError(f"{source} holds no compiled graphs", "compile them first, or name another")
    for path in lists:
        folder = path.rsplit("/", 1)[0]
        destination = f"{root.rstrip('/')}/{folder.rsplit('/', 1)[1]}"
        document = _listing(here.cat_file(path), path)
        if strange := [name for name in document["files"] if _leaves(name)]:
            raise DataError(f"{path} names '{strange[0]}', outside of its folder", "do not use it")
        for name in document["files"]:
            inside = f"{GRAPHS}/{name}"
            there.makedirs(f"{destination}/{inside}".rsplit("/", 1)[0], exist_ok=True)
            with (
                here.open(f"{folder}/{inside}") as file,
                there.open(f"{destination}/{inside}", "wb") as new,
            ):
                shutil.copyfileobj(file, new)
        if there.exists(f"{destination}/{ENTRY}"):
            known = _listing(there.cat_file(f"{destination}/{ENTRY}"), f"{destination}/{ENTRY}")
            document["files"] = {**known["files"], **document["files"]}
            document["seconds"] = max(known["seconds"], document["seconds"])
        there.pipe_file(f"{destination}/{ENTRY}", json.dumps(document, indent=2).encode())
    return len(lists)


def _listing(text: bytes, path: str) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads(text)
        document["files"], document["seconds"]
    except (ValueError, TypeError, KeyError):
        raise DataError(f"{path} is no list of compiled graphs", "remove its folder") from None
    return document


def _leaves(name: str) -> bool:
    return ".." in Path(name).parts or name.startswith("/")


def _purge(folder: Path) -> list[str]:
    """Remove every file that is not what the list says; return their names."""
    files = (read(folder) or {}).get("files", {})
    removed = []
    for name in _names(folder):
        path = folder / GRAPHS / name
        if name not in files or digest(path) != files[name]:
            path.unlink()
            removed.append(name)
    return removed


def _names(folder: Path) -> list[str]:
    graphs = folder / GRAPHS
    return sorted(
        str(path.relative_to(graphs))
        for path in graphs.rglob("*")
        if path.is_file() and path.suffix != ".lock"
    )


def _code(model: nn.Module) -> str:
    """Return a hash of the source that a model's graphs are traced from."""
    own = sorted((choices.PACKAGE / "models").glob("*.py"))
    sources = [Path(inspect.getfile(type(model))), *own]
    texts = b"".join(path.read_bytes() for path in sources)
    return hashlib.sha256(texts).hexdigest()[:KEY_DIGITS]
