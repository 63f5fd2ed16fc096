"""The compiled graph cache, shared by several runs.

    <root>/<key>/entry.json    graph inputs, the hash of every file, compile time
    <root>/<key>/graphs/       compiler files

Graphs are code. Files without a matching hash are deleted before a compiler reads them, and are
compiled again. Listing and copying entries needs no torch.
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

from regauge.accelerators import wait_for_all
from regauge.config import FORMAT, dump
from regauge.run_folders.checkpoint_files import describe_file
from regauge.system import choices
from regauge.system.errors import DataError
from regauge.system.files import find_cache_folder, write_json
from regauge.system.json_files import DocumentShape, find_json, find_mismatch, parse_object
from regauge.system.log import logger
from regauge.system.wording import format_count, join_first

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn

    from regauge.system.processes import World
    from regauge.training.settings import TrainSettings

ENTRY, GRAPHS = "entry.json", "graphs"
KEY_DIGITS = 16
MAX_LOGGED_NAMES = 3
CacheFacts = dict[str, Any]
"""Everything a run's graphs depend on; the entry key is its hash."""


class EntryShape(DocumentShape):
    """Schema of `entry.json`."""

    facts: CacheFacts
    compile_seconds: float
    files: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class CacheEntry:
    """Cached graphs for runs with equal `facts`."""

    folder: Path
    facts: CacheFacts
    is_writer: bool

    def seal(self, seconds: float) -> float:
        """Write the hash of every graph; `seconds` is this process's compile time.

        Returns the longest compile time so far, which later runs save.
        """
        if not self.is_writer:
            return 0.0
        max_seconds: float = max(
            seconds, (read_entry(self.folder) or {}).get("compile_seconds", 0.0)
        )
        files = {
            name: describe_file(self.folder / GRAPHS / name) for name in _list_files(self.folder)
        }
        write_json(
            self.folder / ENTRY,
            {
                "format": FORMAT,
                "facts": self.facts,
                "compile_seconds": round(max_seconds, 3),
                "files": files,
            },
        )
        return max_seconds

    @property
    def graphs_folder(self) -> Path:
        """Folder used by the compiler."""
        return self.folder / GRAPHS


def default_root() -> Path:
    """Return the default cache of `regauge compile`."""
    return find_cache_folder() / "graphs"


def find_root(settings: TrainSettings) -> Path | None:
    """Return the run's cache: from its settings, or the default one if it exists."""
    if settings.execution.compile_cache is not None:
        return Path(settings.execution.compile_cache).resolve()
    is_lazy = settings.accelerator is not None and settings.accelerator.is_lazy
    is_compiled = is_lazy or settings.execution.compile == "blocks"
    return default_root() if is_compiled and default_root().is_dir() else None


def describe_graphs(
    settings: TrainSettings,
    module: nn.Module,
    bucket_lengths: Sequence[tuple[int, ...]],
    world: World,
) -> CacheFacts:
    """Return everything that a run's graphs depend on.

    `bucket_lengths` are the batch lengths per task.
    """
    accelerator = settings.accelerator
    inner: Any = module.model
    execution = settings.execution
    return {
        "versions": {name: version(name) for name in ("regauge", "torch", "transformers")},
        "source_hash": _hash_sources(inner),
        "model": {**inner.config.to_dict(), "dropout": settings.model.dropout},
        "lora": dump(settings.model.lora) if settings.model.lora else None,
        "tasks": [
            {
                "task": dump(config.task),
                "microbatch_rows": config.batch.microbatch_rows,
                "microbatches": -(-config.batch.microbatches // world.size),
                "bucket_lengths": list(lengths),
            }
            for config, lengths in zip(settings.task_configs, bucket_lengths, strict=True)
        ],
        "accelerator": dump(accelerator) if accelerator else None,
        "device_features": sorted(accelerator.features()) if accelerator else [],
        "strategy": dump(settings.strategy) if settings.strategy else None,
        "precision": execution.precision,
        "compile": execution.compile,
        "activation_checkpointing": execution.activation_checkpointing,
        "optimizer": settings.optimizer.kind,
        "max_grad_norm": settings.optimizer.max_grad_norm,
        "evaluation_microbatch_rows": settings.evaluation.microbatch_rows,
        "processes": world.size,
    }


def open_entry(root: Path, facts: CacheFacts, world: World) -> CacheEntry:
    """Open the entry for these facts, with verified files; every process calls this."""
    text = json.dumps(facts, sort_keys=True, default=str)
    key = hashlib.sha256(text.encode()).hexdigest()[:KEY_DIGITS]
    entry = CacheEntry(root / key, json.loads(text), world.is_main_process)
    if world.is_main_process:
        entry.graphs_folder.mkdir(parents=True, exist_ok=True)
        if removed := _purge(entry.folder):
            names = join_first(removed, MAX_LOGGED_NAMES)
            count = format_count(len(removed), "file")
            logger.warning("%s: removed %s with a wrong hash: %s", entry.folder, count, names)
    if world.size > 1:
        wait_for_all()
    return entry


def find_entries(root: Path) -> list[CacheEntry]:
    return [
        CacheEntry(folder, document["facts"], is_writer=True)
        for folder, document in _read_entries(root)
    ]


def list_entries(root: Path) -> list[dict[str, Any]]:
    """Tabulate a cache's sealed entries: key, description, lengths and size."""
    rows = []
    for folder, document in _read_entries(root):
        files, facts = document.get("files", {}), document.get("facts", {})
        tasks = facts.get("tasks", ())
        description = (
            (facts.get("accelerator") or {}).get("kind"),
            facts.get("precision"),
            " and ".join(task["task"]["kind"] for task in tasks),
            facts.get("model", {}).get("model_type"),
        )
        rows.append(
            {
                "key": folder.name,
                "description": " ".join(str(word) for word in description),
                "bucket_lengths": ", ".join(
                    str(length) for task in tasks for length in task["bucket_lengths"]
                ),
                "num_files": len(files),
                "size_mb": round(sum(file["bytes"] for file in files.values()) / 1e6, 1),
                "compile_seconds": document.get("compile_seconds"),
            }
        )
    return rows


def read_entry(folder: Path) -> dict[str, Any] | None:
    """Read `entry.json`; None if it is missing or unreadable."""
    try:
        document = find_json(folder / ENTRY, "remove its folder")
    except DataError:
        return None
    return None if document is None or find_mismatch(document, EntryShape) else document


def _read_entries(root: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    for path in sorted(root.glob(f"*/{ENTRY}")):
        if document := read_entry(path.parent):
            yield path.parent, document


def copy_entries(source: str, target: str) -> int:
    """Copy the entries from one cache to another; return how many.

    A cache is a folder or an object store prefix. Graphs already in the target are kept. Raises
    DataError if there is no entry, or if an entry names files outside its folder.
    """
    import fsspec

    source_store, source_root = fsspec.url_to_fs(source)
    target_store, target_root = fsspec.url_to_fs(target)
    paths = source_store.glob(f"{source_root.rstrip('/')}/*/{ENTRY}")
    if not paths:
        remedy = "run 'regauge compile' first, or name another folder"
        raise DataError(f"{source} contains no compiled graphs", remedy)
    for path in paths:
        folder = path.rsplit("/", 1)[0]
        destination = f"{target_root.rstrip('/')}/{folder.rsplit('/', 1)[1]}"
        document = _parse_entry(source_store.cat_file(path), path)
        if outside := [name for name in document["files"] if _is_outside(name)]:
            raise DataError(f"{path} names '{outside[0]}', outside of its folder", "do not use it")
        for name in document["files"]:
            relative_path = f"{GRAPHS}/{name}"
            target_path = f"{destination}/{relative_path}"
            target_store.makedirs(target_path.rsplit("/", 1)[0], exist_ok=True)
            with (
                source_store.open(f"{folder}/{relative_path}") as source_file,
                target_store.open(target_path, "wb") as target_file,
            ):
                shutil.copyfileobj(source_file, target_file)
        entry_path = f"{destination}/{ENTRY}"
        if target_store.exists(entry_path):
            existing = _parse_entry(target_store.cat_file(entry_path), entry_path)
            document["files"] = {**existing["files"], **document["files"]}
            document["compile_seconds"] = max(
                existing["compile_seconds"], document["compile_seconds"]
            )
        target_store.pipe_file(entry_path, json.dumps(document, indent=2).encode())
    return len(paths)


def _parse_entry(text: bytes, path: str) -> dict[str, Any]:
    try:
        document = parse_object(text)
        problem = find_mismatch(document, EntryShape)
    except ValueError as error:
        document, problem = {}, str(error)
    if problem:
        remedy = "remove its folder"
        raise DataError(f"{path} is not a valid cache entry: {problem}", remedy)
    return document


def _is_outside(name: str) -> bool:
    return ".." in Path(name).parts or name.startswith("/")


def _purge(folder: Path) -> list[str]:
    """Delete files without a matching hash in `entry.json`; return their names."""
    files = (read_entry(folder) or {}).get("files", {})
    removed = []
    for name in _list_files(folder):
        path = folder / GRAPHS / name
        if name not in files or describe_file(path) != files[name]:
            path.unlink()
            removed.append(name)
    return removed


def _list_files(folder: Path) -> list[str]:
    graphs = folder / GRAPHS
    return sorted(
        str(path.relative_to(graphs))
        for path in graphs.rglob("*")
        if path.is_file() and path.suffix != ".lock"
    )


def _hash_sources(model: nn.Module) -> str:
    """Hash the source code from which a model's graphs are traced."""
    modules = sorted((choices.PACKAGE / "models").glob("*.py"))
    sources = [Path(inspect.getfile(type(model))), *modules]
    texts = b"".join(path.read_bytes() for path in sources)
    return hashlib.sha256(texts).hexdigest()[:KEY_DIGITS]
