"""The workers of a model: one for each device, or for each group of cores.

Workers with few cores compute more together than one worker with all cores, because their threads
wait less for each other. A single record takes longer.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from regauge.serving.workers.engine_worker import WorkerRequest
from regauge.serving.workers.worker_main import LoadRequest
from regauge.system import choices
from regauge.system.processes import available_cores

if TYPE_CHECKING:
    from regauge.inference.export.artifact import Artifact
    from regauge.serving.settings import WorkerSettings


def build_load_requests(artifact: Artifact, settings: WorkerSettings) -> list[LoadRequest]:
    """Return a request for each worker of a model: one per device, or per group of cores."""
    accelerator = artifact.accelerator
    num_groups = _count_groups(artifact, settings)
    count = num_groups if settings.count == "auto" else settings.count
    path = str(getattr(artifact, "path", "") or artifact.folder)
    custom_paths = list(choices.list_allowed_paths())
    source = str(artifact.source or "")
    request = LoadRequest(
        path=path, source=source, threads=settings.threads, custom_paths=custom_paths
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


def build_worker_requests(
    artifact: Artifact, settings: WorkerSettings, *, batch_invariant: bool
) -> list[WorkerRequest]:
    """Return a request for each worker that computes batches."""
    return [
        WorkerRequest(**request.to_header(), batch_invariant=batch_invariant)
        for request in build_load_requests(artifact, settings)
    ]


def split_cores(count: int) -> list[list[int]]:
    """Return the cores of this process in `count` groups; a core is shared if there are fewer."""
    cores = sorted(os.sched_getaffinity(0))
    if count >= len(cores):
        return [[cores[index % len(cores)]] for index in range(count)]
    return [[int(core) for core in group] for group in np.array_split(cores, count)]
