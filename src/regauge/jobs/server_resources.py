"""CPUs and memory for a launched server's replica, planned from its artifacts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from regauge.inference.export.artifact import open_unchecked
from regauge.inference.export.manifest import MANIFEST, ArtifactManifest
from regauge.jobs.targets._server_spec import ServerResources
from regauge.machines.machine_rates import GIB
from regauge.registry.model_reference import parse_reference

if TYPE_CHECKING:
    from regauge.serving.settings import Serve

SERVER_CPUS = 1
"""CPUs for the process that reads and answers requests."""
SERVER_BYTES = 0.75 * GIB
"""Memory for the same process."""
WORKER_BYTES = 1.0 * GIB
"""Worker memory besides the model: libraries, and the batches' activations."""
COPIES = 3
"""How often a loading worker holds an artifact: file, weights, and converted weights."""
VERSIONS = 2
"""Versions in memory while a new one replaces the current one."""


def plan_resources(settings: Serve) -> ServerResources | None:
    """Return the CPUs and memory for all models, each with `workers.count` workers or one.

    The export measured the threads per worker. None if an artifact lies elsewhere than on this
    machine, needs an accelerator, or generates text, whose cache takes the memory it gets.
    """
    manifests = [_find_manifest(text) for text in settings.artifacts.values()]
    options = settings.workers
    count = 1 if options.count == "auto" else options.count
    cpus, sizes = [], []
    for manifest in manifests:
        if manifest is None or manifest.target.accelerator != "cpu":
            return None
        if manifest.program.output_kind == "text":
            return None
        cpus.append(count * (options.threads or manifest.target.threads))
        num_bytes = sum(file.bytes for file in manifest.files.values())
        sizes.append(count * (WORKER_BYTES + COPIES * num_bytes))
    num_loaded = settings.models.max_loaded or len(sizes)
    num_cpus = SERVER_CPUS + sum(sorted(cpus)[-num_loaded:])
    memory = SERVER_BYTES + sum(sorted(sizes)[-num_loaded:]) + (VERSIONS - 1) * max(sizes)
    return ServerResources(count, num_cpus, math.ceil(memory / GIB))


def _find_manifest(text: str) -> ArtifactManifest | None:
    """Return an artifact folder's manifest, or a version's in a registry folder."""
    reference = parse_reference(text)
    if reference is not None:
        if not Path(reference.registry).expanduser().is_dir():
            return None
        text = reference.resolve().folder
    folder = Path(text).expanduser()
    return open_unchecked(folder).manifest if (folder / MANIFEST).is_file() else None
