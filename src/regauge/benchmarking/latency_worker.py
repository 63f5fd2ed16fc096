"""One artifact's turn, in a process that `worker.run_worker` starts.

A process of its own tells how long an artifact takes until it is ready, and what memory it has.
Every latency goes into a file, a line for each batch, length and rate.
"""

from __future__ import annotations

import json
import math
import os
import platform
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from regauge import config, log, processes
from regauge.artifacts import artifact as artifacts
from regauge.artifacts.engine import loaded, warm
from regauge.artifacts.manifest import MODEL
from regauge.benchmarking import load_generator
from regauge.benchmarking.settings import Measuring
from regauge.data.randomness import keyed
from regauge.errors import explain
from regauge.models import architectures
from regauge.models.flops import flops_per_token
from regauge.models.inference_modules import examples
from regauge.models.io_spec import LENGTH
from regauge.worker import receive_job

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from regauge.artifacts.artifact import Artifact
    from regauge.artifacts.buckets import BucketBatch
    from regauge.artifacts.engine import Engine

STARTED = time.monotonic()
"""After the imports, on the clock that all processes of a machine share."""
WHOLE = ("vectors", "classes", "values")
"""Answers that one pass through the blocks gives, whose operations can be counted."""


@dataclass(frozen=True)
class Request:
    """Records that are answered together, as the program takes them."""

    rows: int
    length: int
    """Real tokens of each text."""
    shapes: list[tuple[int, int]]
    """Rows and length of each batch that it is computed in."""
    batches: list[tuple[Tensor, ...]]
    tokens: int
    """Real ones, of all texts."""


@dataclass(frozen=True)
class Bench:
    """An artifact at work, and what is asked of it."""

    asked: Measuring
    number: int
    """Of the turn."""
    name: str
    artifact: Artifact
    engine: Engine

    def answer(self, request: Request) -> None:
        """Compute a request; its answers are on the host when this returns."""
        outputs = [self.engine.runner(*batch) for batch in request.batches]
        for output in outputs:
            output.float().cpu()


def main() -> None:
    """Do the turn that a file asks for; what goes wrong is its last line."""
    job = receive_job()
    request = job.request
    os.dup2(2, 1)  # what a library prints is no part of the command's answer
    log.configure()
    try:
        settings = config.build(Measuring, request["settings"])
        for line in measured(settings, request["name"], request["number"], request["began"]):
            job.write_line(line)
    except Exception as error:  # noqa: BLE001 - the parent says it, whatever it is
        message, code = explain(error)
        job.write_line({"error": message, "code": code})
        sys.exit(code)


def measured(asked: Measuring, name: str, number: int, began: float) -> Iterator[dict[str, Any]]:
    """Yield what is found of an artifact: how it starts, each of its loads, and its chip.

    `began` is when its process was started, on the clock of `STARTED`.
    """
    artifact = artifacts.opened(asked.inference.artifacts[name])
    bench = Bench(asked, number, name, artifact, loaded(artifact, invariant=False))
    there = time.monotonic()
    warm(bench.engine, artifact)
    ready = {
        "start_seconds": STARTED - began,
        "load_seconds": there - STARTED,
        "warmup_seconds": time.monotonic() - there,
    }
    yield {"ready": {**ready, "seconds": sum(ready.values())}, "machine": machine()}
    for length in asked.inference.lengths:
        for rows in asked.inference.rows:
            yield from loads(bench, request_of(bench, rows, length))
    memory = artifact.accelerator.peak_memory_bytes()  # before the peak of the chip is measured
    yield {"memory_bytes": memory, **_peak(artifact)}


def request_of(bench: Bench, rows: int, length: int) -> Request:
    """Return a request for records whose texts have so many real tokens each.

    Its batches are those of the artifact's ladder, so that it is padded and cut as in use.
    """
    inputs = bench.artifact.manifest.program.inputs
    shapes, batches = [], []
    for batch in bench.engine.ladder.batches(np.full(rows, length, np.int64)):
        tensors = examples(inputs, batch.rows, batch.length)
        for each, tensor in zip(inputs, tensors, strict=True):
            if each.name == "lengths":
                tensor.fill_(length)
                tensor[len(batch.members) :] = 0
            elif LENGTH in each.shape and not tensor.is_floating_point():
                _write_words(tensor, batch, _vocabulary(bench.artifact), bench.asked.seed)
                tensor[..., length:] = 0
        shapes.append((batch.rows, batch.length))
        batches.append(tensors)
    return Request(rows, length, shapes, batches, rows * length * _texts(bench.artifact))


def loads(bench: Bench, request: Request) -> Iterator[dict[str, Any]]:
    """Yield how a request is answered when each follows the one before, and at each rate."""
    asked, where = bench.asked, {"rows": request.rows, "length": request.length}
    for _ in range(asked.inference.warmup):
        bench.answer(request)
    meter, clock = bench.artifact.accelerator.meter(), load_generator.Clock()
    found = load_generator.closed(lambda: bench.answer(request), asked.inference.seconds, clock)
    joules = meter() if meter else None
    yield {
        "closed": where,
        "milliseconds": [round(each, 4) for each in found.milliseconds],
        "seconds": found.seconds,
        "joules": joules,
        "shapes": request.shapes,
        "tokens": request.tokens,
        "flops": flops(bench.artifact, request),
    }
    per_second = len(found.milliseconds) / found.seconds
    _say(bench, request, f"{per_second * request.rows:.4g} inferences/s", found.milliseconds)
    for place, (share, rate) in enumerate(_rates(asked, per_second)):
        key = (asked.seed, request.rows, request.length, place, bench.number)
        moments = load_generator.arrivals(rate, asked.arrivals.seconds, *key)
        taken = load_generator.opened(
            lambda: bench.answer(request), moments.tolist(), asked.arrivals.seconds, clock
        )
        yield {
            "open": where,
            "share": share,
            "rate": rate,
            "arrivals": [round(each, 6) for each in moments.tolist()],
            "milliseconds": [round(each, 4) if math.isfinite(each) else None for each in taken],
        }
        _say(bench, request, f"{rate:.4g} requests/s", taken)


def _rates(asked: Measuring, closed: float) -> list[tuple[float | None, float]]:
    """Return each share, where it is one, with its requests a second."""
    shares = [(share, share * closed) for share in asked.arrivals.shares]
    return [*shares, *((None, rate) for rate in asked.arrivals.rates)]


def _say(bench: Bench, request: Request, what: str, taken: list[float]) -> None:
    middle = sorted(taken)[len(taken) // 2] if taken else math.nan
    within = f"half within {middle:.4g} ms" if math.isfinite(middle) else "too few were answered"
    turns = f"turn {bench.number} of {bench.asked.inference.turns}"
    where = f"{bench.name}, {request.rows} x {request.length}"
    log.logger.info("%s, %s: %s, %s", turns, where, what, within)


def flops(artifact: Artifact, request: Request) -> float | None:
    """Return the operations of a request's real tokens, a third of what training on them takes.

    See `counting.FLOPS`: forward is 2 N + 4 L h S a token. None for a model of which no pass can be
    told from its configuration.
    """
    program, folder = artifact.manifest.program, artifact.folder / MODEL
    if program.answers not in WHOLE or not (folder / "config.json").is_file():
        return None
    model = architectures.template(folder)
    return request.tokens * flops_per_token(model, request.length) / 3


def machine() -> dict[str, Any]:
    """Return what a reader must know of the machine beside its chip."""
    return {
        "platform": platform.platform(),
        "cores": processes.available_cores(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _peak(artifact: Artifact) -> dict[str, Any]:
    """Return the chip with its peak for the artifact's precision; that of integers is not known."""
    compiled = artifact.manifest.compiled
    chip = artifact.accelerator.chip(compiled.precision)
    peak = chip.flops_per_second.get(compiled.precision) if compiled.quantized == "no" else None
    source = "unknown" if peak is None else f"{compiled.precision}: {chip.source}"
    return {"chip": chip.name, "peak_flops_per_second": peak, "peak_source": source}


def _write_words(tensor: Tensor, batch: BucketBatch, words: int, seed: int) -> None:
    """Put keyed words into the texts of a batch's members, [rows, …, length]."""
    count = len(batch.members)
    places = np.arange(tensor[:count].numel(), dtype=np.int64)
    chosen = (keyed(seed, places) % np.uint64(words)).astype(np.int64)
    tensor.zero_()
    tensor[:count] = torch.from_numpy(chosen).view(tensor[:count].shape).to(tensor.dtype)


def _vocabulary(artifact: Artifact) -> int:
    """Return how many words a model knows for certain."""
    path = artifact.folder / MODEL / "config.json"
    known = json.loads(path.read_text()).get("vocab_size") if path.is_file() else None
    return known if isinstance(known, int) else 2


def _texts(artifact: Artifact) -> int:
    """Return how many texts each record has; 0 for one that has none."""
    words = next((each for each in artifact.manifest.program.inputs if LENGTH in each.shape), None)
    return math.prod(size for size in words.shape if isinstance(size, int)) if words else 0


if __name__ == "__main__":
    main()
