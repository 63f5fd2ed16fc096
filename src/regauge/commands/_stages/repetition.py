"""Selects a pipeline's round to run: the unfinished one, the last one, or a new one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from regauge.commands._stages import resolve_stages
from regauge.commands._stages.repeating import RoundInputs, list_increments
from regauge.commands._stages.status import inspect_stages
from regauge.data.input_hashes import FileHashes, InputHashes
from regauge.registry.pipelines.rounds import (
    Round,
    RoundStage,
    read_clocks,
    read_rounds,
    save_round,
    select_new_files,
)
from regauge.registry.pipelines.serving_model import (
    find_serving,
    find_serving_version,
    read_promoted_version,
)

if TYPE_CHECKING:
    from pathlib import Path

    from regauge.commands._stages import ResolvedStage
    from regauge.commands._stages.pipeline_file import PipelineFile
    from regauge.commands._stages.status import StageStatus
    from regauge.registry.pipelines.settings import Repeat

CACHE = "data_hashes.json"
"""File with known hashes, in the pipeline folder."""


@dataclass
class Repetition:
    """A pipeline's rounds, and the one to run."""

    folder: Path
    settings: Repeat
    rounds: list[Round]
    """Stored rounds."""
    current: Round
    hashes: InputHashes
    stages: list[ResolvedStage] = field(default_factory=list)
    """Stages in the current round."""
    statuses: dict[str, StageStatus] = field(default_factory=dict)

    @property
    def is_new(self) -> bool:
        """Whether the round has not begun yet."""
        return all(entry.number != self.current.number for entry in self.rounds)

    @property
    def earlier_rounds(self) -> list[Round]:
        return [entry for entry in self.rounds if entry.number < self.current.number]

    def begin(self) -> None:
        """Store the round, so that a run after a kill continues it."""
        self._save(state="running", refused_sha256=None)
        self.hashes.save(self.folder / CACHE)

    def record_stage(self, stage: ResolvedStage, outcome: dict[str, Any], *, ran: bool) -> None:
        """Record a finished stage; `ran`: whether it ran now."""
        entry = self.current.find_stage(stage.name, stage.sha256) or RoundStage(
            name=stage.name,
            folder=str(stage.folder),
            sha256=stage.sha256,
            seconds=float(outcome["seconds"]),
            is_reused=not ran,
        )
        others = [item for item in self.current.stages if item.name != stage.name]
        self._save(stages=[*others, entry])

    def finish(self) -> None:
        """Record the round as finished."""
        self._save(state="finished")

    def refuse(self, stage: ResolvedStage) -> None:
        """Record a gate's refusal of the new model."""
        self._save(state="refused", refused_sha256=stage.sha256)

    def _save(self, **changes: Any) -> None:
        self.current = self.current.model_copy(update=changes)
        self.rounds = save_round(self.folder, self.rounds, self.current)


def select_round(
    pipeline: PipelineFile, repeat: Repeat, earlier: Repetition | None = None
) -> Repetition:
    """Return the round to run, without writing anything.

    An unfinished or refused round is continued. A finished one is followed by a new one if a file
    has arrived, or if another stage input has changed. `earlier` is an earlier selection, whose
    file hashes are known.
    """
    rounds = read_rounds(pipeline.folder)
    hashes = earlier.hashes if earlier else InputHashes([pipeline.folder / CACHE])
    patterns = list_increments(pipeline.stages, pipeline.shared, repeat)
    present = {name: hashes.hash_patterns(item) for name, item in patterns.items()}

    def resolve(current: Round) -> Repetition:
        return _resolve(pipeline, Repetition(pipeline.folder, repeat, rounds, current, hashes))

    if not rounds:
        return resolve(_start(pipeline, 1, present))
    last = rounds[-1]
    if last.state != "running" and (new_files := select_new_files(rounds, present)) is not None:
        return resolve(_start(pipeline, last.number + 1, new_files))
    same = resolve(last)
    if all(status.state == "finished" for status in same.statuses.values()):
        return same
    if last.state == "finished":
        return resolve(_start(pipeline, last.number + 1, last.files))
    return _compare_with_present(pipeline, same)


def _start(pipeline: PipelineFile, number: int, files: dict[str, FileHashes]) -> Round:
    version = _find_version(pipeline)
    return Round(
        number=number,
        state="running",
        began=read_clocks(),
        files=files,
        base=version,
        serving=version,
        stages=[],
    )


def _compare_with_present(pipeline: PipelineFile, repetition: Repetition) -> Repetition:
    """Compare the round with the model serving now, unless it came from the round; return it."""
    version = _find_version(pipeline)
    promotions = [stage.folder for stage in repetition.stages if stage.verb == "promote"]
    is_own = version is not None and version in map(read_promoted_version, promotions)
    if version == repetition.current.serving or is_own:
        return repetition
    repetition.current = repetition.current.model_copy(update={"serving": version})
    return _resolve(pipeline, repetition)


def _find_version(pipeline: PipelineFile) -> str | None:
    registry = pipeline.settings.registry
    return None if registry is None else find_serving_version(registry)


def _resolve(pipeline: PipelineFile, repetition: Repetition) -> Repetition:
    registry, current = pipeline.settings.registry, repetition.current
    base, serving = (
        find_serving(registry, version) if registry and version else None
        for version in (current.base, current.serving)
    )
    inputs = RoundInputs(current, base, serving, repetition.hashes)
    repetition.stages = resolve_stages(pipeline.stages, pipeline.shared, pipeline.folder, inputs)
    repetition.statuses = inspect_stages(repetition.stages)
    return repetition
