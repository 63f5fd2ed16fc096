"""The ways in which a program could be computed here: each built, proved and timed."""

from __future__ import annotations

import copy
import statistics
import time
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from regauge.artifacts import quality
from regauge.artifacts.buckets import Ladder, ladder
from regauge.artifacts.engine import Answering, Engine
from regauge.backends import Calibration, Job, Payload, Shape, Site, require, usable_for
from regauge.errors import SettingsError, plain
from regauge.models.inference_modules import cast, tensors
from regauge.models.tensors import dtype_of
from regauge.processes import available_cores

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor, nn

    from regauge.accelerators import Accelerator, Precision

    Metrics = Callable[[nn.Module], dict[str, float]]
    from regauge.artifacts.export_settings import Candidates, Exporting
    from regauge.artifacts.manifest import Rung
    from regauge.artifacts.programs import Described
    from regauge.artifacts.rows import Records
    from regauge.backends import Backend, Quantized, Runner

TURNS = 5
"""Of one text alone, at least."""
RACES = 3
"""Turns of those that are nearly alike."""
SAMPLES = 256
"""Texts that scales of integers are chosen by, at most: they are proved on as many others."""


@dataclass(frozen=True)
class Candidate:
    """One way to compute a program."""

    backend: Backend
    precision: Precision
    quantized: Quantized
    threads: int

    @property
    def facts(self) -> dict[str, Any]:
        """What people tell it from others by."""
        own = self.backend.model_dump(mode="json", exclude_defaults=True)
        set_apart = {name: value for name, value in own.items() if name != "kind"}
        return {
            "backend": self.backend.kind,
            **({"settings": set_apart} if set_apart else {}),
            "precision": self.precision,
            "quantized": self.quantized,
            "threads": self.threads,
        }


@dataclass(frozen=True)
class Work:
    """What all candidates of an export share."""

    settings: Exporting
    described: Described
    accelerator: Accelerator
    rows: Records
    """Real ones."""
    reference: np.ndarray
    """What fp32 answers to them, [records, width]."""
    metrics: Metrics | None = None
    """Measures a module on what a run held out."""
    quality: dict[str, float] = field(default_factory=dict)
    """What these metrics of fp32 are."""

    @cached_property
    def calibration(self) -> Calibration:
        """Some of the records, by which candidates that multiply integers choose their scales."""
        some = self.rows.some(np.arange(min(SAMPLES, -(-len(self.rows) // 2))))
        rungs = ladder(self.settings.shapes, self.described.longest, symbolic=True)
        batches = Ladder(rungs, filled=False).batches(some.lengths)
        samples = [some.inputs(batch) for batch in batches]
        return Calibration(self.described.program, samples, self.settings.proof.bound)

    def measured(self, engine: Engine) -> dict[str, float]:
        """Return the metrics of a program at work; none where no run says which."""
        if self.metrics is None:
            return {}
        described = self.described
        return self.metrics(Answering(engine, described.answers, described.fields))


@dataclass(frozen=True)
class Built:
    """A candidate at work."""

    candidate: Candidate
    folder: Path
    """Of its payload."""
    rungs: tuple[Rung, ...]
    weights: Mapping[str, Tensor]
    site: Site
    runner: Runner

    def engine(self, work: Work) -> Engine:
        """Return it with its ladder."""
        filled = not self.candidate.backend.symbolic
        return Engine(self.runner, Ladder(self.rungs, filled=filled), work.described.width)


def listed(wanted: Candidates, accelerator: Accelerator, described: Described) -> list[Candidate]:
    """Return what is tried; raises SettingsError for a backend that is not usable, or for none."""
    for backend in wanted.backends:
        require(backend, accelerator)
    usable = (each for each in usable_for(accelerator) if each.kind != "lazy")
    backends = list(wanted.backends or usable)
    if wanted.portable is not None:
        backends = _those(backends, "compile for an instruction set", lambda each: each.ahead)
    if described.answers == "text":
        backends = _those(backends, "go on with a text", lambda each: each.looping)
    made = [
        Candidate(backend, precision, quantized, threads)
        for backend in backends
        for precision, quantized in backend.forms(accelerator)
        if quantized in wanted.quantized
        and precision in (wanted.precisions or _worth_trying(accelerator))
        for threads in wanted.threads or (available_cores(),)
    ]
    if not made:
        forms = (f"{each.kind}: {_forms(each, accelerator)}" for each in backends)
        problem = "no candidate has the precisions and quantized that are asked for"
        raise SettingsError(problem, f"name some of {'; '.join(forms)}")
    return made


def _those(
    backends: Sequence[Backend], able: str, fits: Callable[[Backend], bool]
) -> list[Backend]:
    """Return the backends that can do something; raises SettingsError where none can."""
    found = [each for each in backends if fits(each)]
    if not found:
        kinds = ", ".join(each.kind for each in backends)
        raise SettingsError(f"what is tried cannot {able}: {kinds}", "name other backends")
    return found


def _forms(backend: Backend, accelerator: Accelerator) -> str:
    """Return what a backend computes in, in words."""
    forms = backend.forms(accelerator)
    return ", ".join(
        precision if quantized == "no" else f"{precision} with {quantized}"
        for precision, quantized in forms
    )


def reference(described: Described, settings: Exporting) -> Engine:
    """Return what answers in fp32, operation by operation on the CPU."""
    rungs = ladder(settings.shapes, described.longest, symbolic=True)
    return Engine(_Plain(described.program), Ladder(rungs, filled=False), described.width)


def built(work: Work, candidate: Candidate, folder: Path) -> Built:
    """Load a candidate's payload from a folder; where there is none it is compiled first."""
    backend, described = candidate.backend, work.described
    rungs = ladder(
        work.settings.shapes,
        described.longest,
        symbolic=backend.symbolic and described.answers != "text",
    )
    shapes = [Shape(rung.rows[0], rung.length) for rung in rungs]
    device = work.accelerator.claim(0, candidate.threads)
    site = Site(work.accelerator, device, candidate.threads)
    program = copy.deepcopy(described.program)
    cast(program, dtype_of(candidate.precision))
    level = work.settings.candidates.portable
    weights = {name: value.detach() for name, value in tensors(program).items()}
    job = Job(
        program,
        described.inputs,
        shapes,
        candidate.precision,
        candidate.quantized,
        level,
        work.calibration,
    )
    if not folder.exists():
        folder.mkdir(parents=True)
        backend.export(job, site, folder)
    payload = Payload(
        folder, described.inputs, shapes, candidate.precision, lambda: weights, lambda: program
    )
    return Built(candidate, folder, rungs, weights, site, backend.load(payload, site))


def tried(work: Work, made: Built) -> dict[str, Any]:
    """Return what is seen of a candidate: its parity, its pace, and its wait for one text."""
    described, engine = work.described, made.engine(work)
    answers = engine.answers(work.rows)
    found = quality.differences(answers, work.reference, described.answers)
    if own := work.measured(engine):
        lost = quality.metrics_loss(own, work.quality)
        found |= {f"heldout/{name}": value for name, value in own.items()}
        found["loss"] = max(found["loss"], lost)
    seconds = work.settings.candidates.seconds
    return {**made.candidate.facts, **_paces(engine, work.rows, seconds), **found}


def raced(work: Work, finalists: Sequence[Built]) -> list[dict[str, float]]:
    """Return the paces of candidates that are timed in turns: the medians over these.

    The machine changes from minute to minute; what alternates meets the same of it.
    """
    engines = [made.engine(work) for made in finalists]
    seconds = work.settings.candidates.seconds / RACES
    turns = [[_paces(each, work.rows, seconds) for each in engines] for _ in range(RACES)]
    return [
        {name: statistics.median(pace[name] for pace in own) for name in own[0]}
        for own in zip(*turns, strict=True)
    ]


def failed(candidate: Candidate, error: Exception) -> dict[str, Any]:
    """Return the row of a candidate that could not be built."""
    return {**candidate.facts, "failed": plain(error)[:200]}


def _worth_trying(accelerator: Accelerator) -> tuple[Precision, ...]:
    """Return fp32 and what the device is faster in."""
    every = accelerator.precisions()
    return every[: every.index("fp32") + 1] if "fp32" in every else every


def _paces(engine: Engine, rows: Records, seconds: float) -> dict[str, float]:
    """Return texts and real tokens a second, and the median wait for a text of median length."""
    taken: list[float] = []
    until = time.perf_counter() + seconds
    while not taken or time.perf_counter() < until:
        began = time.perf_counter()
        engine.answers(rows)
        taken.append(time.perf_counter() - began)
    best = statistics.median(taken)
    one = rows.some(np.argsort(rows.lengths, kind="stable")[[len(rows) // 2]])
    waits: list[float] = []
    until = time.perf_counter() + seconds / 4
    while len(waits) < TURNS or time.perf_counter() < until:
        began = time.perf_counter()
        engine.answers(one)
        waits.append(time.perf_counter() - began)
    return {
        "texts_per_second": len(rows) / best,
        "tokens_per_second": rows.tokens / best,
        "one_text_ms": 1e3 * statistics.median(waits),
    }


class _Plain:
    """A program as it is."""

    def __init__(self, program: nn.Module) -> None:
        self._program = program

    @torch.no_grad()
    def __call__(self, *inputs: Tensor) -> Tensor:
        output: Tensor = self._program(*inputs)
        return output

    def graphs(self) -> int:
        return 0
