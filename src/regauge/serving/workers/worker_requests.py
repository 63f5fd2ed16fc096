"""A model's workers: one per device, or per group of cores.

Several workers with few cores compute more than one worker with all cores, because their threads
wait less for each other. A single record takes longer.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from regauge.system import choices
from regauge.system.processes import available_cores

if TYPE_CHECKING:
    from regauge.inference.export.artifact import Artifact
    from regauge.serving.settings import WorkerSettings


@dataclass(frozen=True, kw_only=True)
class LoadRequest:
    """What a worker loads, and where it runs."""

    path: str
    """Artifact, run or model folder."""
    source: str = ""
    """Folder that `path` is a copy of; messages name it."""
    only_describes: bool = False
    """Whether the worker only reports what a model folder computes."""
    batch_invariant: bool = False
    """Whether outputs have the same bits in every batch."""
    generation: dict[str, Any] | None = None
    """The table of `TextServing` if the worker generates text."""
    threads: int | None = None
    device: int = 0
    cores: list[int] = field(default_factory=list)
    """Cores to which the worker is bound; empty for all of them."""
    custom_paths: list[str] = field(default_factory=list)
    """Import paths of custom code allowed by the command."""

    @property
    def origin(self) -> str:
        """The path named in messages."""
        return self.source or self.path

    def to_header(self) -> dict[str, Any]:
        """Return the request as a message header."""
        return asdict(self)

    def name_origin(self, document: dict[str, Any]) -> dict[str, Any]:
        """Replace the path of a copy in an error's texts with the source path."""
        return {
            key: value.replace(self.path, self.origin) if isinstance(value, str) else value
            for key, value in document.items()
        }

    def prepare_process(self) -> None:
        """Bind this process to its cores, and permit its custom code."""
        if self.cores:
            os.sched_setaffinity(0, self.cores)
        choices.allow_imports(self.custom_paths)


def build_load_requests(
    artifact: Artifact, settings: WorkerSettings, **options: Any
) -> list[LoadRequest]:
    """Return a request per worker of a model: one per device, or per group of cores.

    `options` are the request fields that do not depend on the worker.
    """
    accelerator = artifact.accelerator
    num_groups = _count_groups(artifact, settings)
    count = num_groups if settings.count == "auto" else settings.count
    request = LoadRequest(
        path=str(getattr(artifact, "path", "") or artifact.folder),
        source=str(artifact.source or ""),
        threads=settings.threads,
        custom_paths=list(choices.list_allowed_paths()),
        **options,
    )
    if not accelerator.on_host:
        return [replace(request, device=index % num_groups) for index in range(count)]
    if count == 1:
        return [request]
    cores = available_cores()
    threads = settings.threads or max(1, cores // count)
    groups = split_cores(count) if settings.pin_cores else [[]] * count
    return [replace(request, threads=threads, cores=group) for group in groups]


def _count_groups(artifact: Artifact, settings: WorkerSettings) -> int:
    """Return how many groups of devices, or of cores, compute a model.

    A CPU that generates text has one group; all requests share batches and memory.
    """
    accelerator, manifest = artifact.accelerator, artifact.manifest
    if accelerator.on_host and manifest.program.output_kind == "text":
        return 1
    if accelerator.on_host:
        return max(1, available_cores() // (settings.threads or manifest.target.threads))
    return max(1, accelerator.num_devices() // manifest.compiled.backend.num_devices)


def split_cores(count: int) -> list[list[int]]:
    """Split this process's cores into `count` groups; cores are shared if there are fewer."""
    cores = sorted(os.sched_getaffinity(0))
    if count >= len(cores):
        return [[cores[index % len(cores)]] for index in range(count)]
    return [[int(core) for core in group] for group in np.array_split(cores, count)]
