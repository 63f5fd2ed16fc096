"""The workers of a model: one for each device, or for each group of cores.

Workers with few cores compute more together than one worker with all cores, because their threads
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
    """Folder of an artifact, a run or a model."""
    source: str = ""
    """The folder that `path` is a copy of; messages name it."""
    batch_invariant: bool = False
    """Whether an output has the same bits in every batch."""
    generation: dict[str, Any] | None = None
    """The table of `TextServing` if the worker generates text."""
    threads: int | None = None
    device: int = 0
    cores: list[int] = field(default_factory=list)
    """The cores that the worker is bound to; empty if it may use all of them."""
    custom_paths: list[str] = field(default_factory=list)
    """Import paths of custom code that the command allows."""

    @property
    def origin(self) -> str:
        """The path that messages name."""
        return self.source or self.path

    def to_header(self) -> dict[str, Any]:
        """Return the request as the header of a message."""
        return asdict(self)

    def name_origin(self, document: dict[str, Any]) -> dict[str, Any]:
        """Replace the path of a copy in the texts of an error by the path of its source."""
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
    """Return a request for each worker of a model: one per device, or per group of cores.

    `options` are the fields of the requests that do not depend on the worker.
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
    """Return the number of groups of devices, or of cores, that compute a model.

    A CPU that generates text has one group, whose batches and memory all requests share.
    """
    accelerator, manifest = artifact.accelerator, artifact.manifest
    if accelerator.on_host and manifest.program.output_kind == "text":
        return 1
    if accelerator.on_host:
        return max(1, available_cores() // (settings.threads or manifest.target.threads))
    return max(1, accelerator.num_devices() // manifest.compiled.backend.num_devices)


def split_cores(count: int) -> list[list[int]]:
    """Return the cores of this process in `count` groups; a core is shared if there are fewer."""
    cores = sorted(os.sched_getaffinity(0))
    if count >= len(cores):
        return [[cores[index % len(cores)]] for index in range(count)]
    return [[int(core) for core in group] for group in np.array_split(cores, count)]
