"""Selects the round that a pipeline runs: the unfinished one, the last one, or a new one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from regauge.commands._stages.repeating import RoundInputs, list_increments, resolve_round
from regauge.commands._stages.status import inspect_stages
from regauge.registry.pipelines.data_hashes import DataHasher
from regauge.registry.pipelines.elapsed_time import RoundClock, SystemClock, read_moment
from regauge.registry.pipelines.rounds import Round, read_rounds, save_round, select_new_files
from regauge.registry.pipelines.serving_model import find_serving, read_promoted_version

if TYPE_CHECKING:
    from pathlib import Path

    from regauge import config
    from regauge.commands._stages import ResolvedStage, Stage
    from regauge.commands._stages.status import StageStatus
    from regauge.registry.pipelines.settings import RegistryModel, Repeat

CLOCK: RoundClock = SystemClock()


@dataclass
class Repetition:
    """The rounds of a pipeline, and the one that it runs."""

    folder: Path
    settings: Repeat
    rounds: list[Round]
    """The stored rounds."""
    current: Round
    hasher: DataHasher

    @property
    def is_new(self) -> bool:
        """Whether the round has not begun yet."""
        return all(entry.number != self.current.number for entry in self.rounds)

    @property
    def earlier_rounds(self) -> list[Round]:
        """The rounds before the current one."""
        return [entry for entry in self.rounds if entry.number < self.current.number]

    def begin(self) -> None:
        """Store the round, so that a run after a kill continues it."""
        self._save(replace(self.current, state="running", refused_sha256=None))
        self.hasher.save()

    def record_stage(self, stage: ResolvedStage, outcome: dict[str, Any], *, ran: bool) -> None:
        """Record a finished stage; `ran`: whether it ran now."""
        sha256 = str(stage.compute_identity({})["sha256"])
        known = self.current.find_stage(stage.name, sha256)
        document = known or {
            "name": stage.name,
            "folder": str(stage.folder),
            "sha256": sha256,
            "seconds": float(outcome["seconds"]),
            "is_reused": not ran,
        }
        self._save(self.current.with_stage(document))

    def finish(self) -> None:
        """Record that all stages of the round are finished."""
        self._save(replace(self.current, state="finished"))

    def refuse(self, stage: ResolvedStage) -> None:
        """Record that a gate has refused the new model."""
        sha256 = str(stage.compute_identity({})["sha256"])
        self._save(replace(self.current, state="refused", refused_sha256=sha256))

    def _save(self, current: Round) -> None:
        self.current = current
        self.rounds = save_round(self.folder, self.rounds, current)


@dataclass(frozen=True)
class RoundSelection:
    """The round of a pipeline with its stages."""

    repetition: Repetition
    stages: list[ResolvedStage]
    statuses: dict[str, StageStatus]


@dataclass(frozen=True)
class RoundSelector:
    """The inputs of the selection."""

    stages: tuple[Stage, ...]
    shared: config.Tables
    folder: Path
    repeat: Repeat
    registry: RegistryModel | None
    earlier: Repetition | None = None
    """The selection before, whose hashes of files are known."""

    @cached_property
    def hasher(self) -> DataHasher:
        """The hashes of the data."""
        return self.earlier.hasher if self.earlier else DataHasher(self.folder)

    def select(self) -> RoundSelection:
        """Return the round to run; writes nothing.

        An unfinished or refused round is continued. A finished one is followed by a new one if a
        file has arrived, or if another input of a stage has changed.
        """
        rounds = read_rounds(self.folder)
        patterns = list_increments(self.stages, self.shared, self.repeat)
        present = {name: self.hasher.hash_patterns(item) for name, item in patterns.items()}
        last = rounds[-1] if rounds else None
        if last is None:
            return self._resolve(rounds, self._start_round(1, present))
        if last.state != "running":
            new_files = select_new_files(rounds, present)
            if new_files is not None:
                return self._resolve(rounds, self._start_round(last.number + 1, new_files))
        selection = self._resolve(rounds, last)
        if all(status.state == "finished" for status in selection.statuses.values()):
            return selection
        if last.state == "finished":
            return self._resolve(rounds, self._start_round(last.number + 1, last.files))
        return self._compare_with_present(selection)

    def _start_round(self, number: int, new_files: dict[str, dict[str, str]]) -> Round:
        """Return a new round, which starts from the model that serves now."""
        serving = self._find_version()
        return Round(
            number, read_moment(CLOCK), files=dict(new_files), base=serving, serving=serving
        )

    def _compare_with_present(self, selection: RoundSelection) -> RoundSelection:
        """Return the round compared with the model that serves now, unless it is its own."""
        current, version = selection.repetition.current, self._find_version()
        promotions = [stage.folder for stage in selection.stages if stage.verb == "promote"]
        is_own = version is not None and version in map(read_promoted_version, promotions)
        if version == current.serving or is_own:
            return selection
        repetition = selection.repetition
        current = replace(current, serving=version)
        return self._resolve(repetition.rounds, current)

    def _find_version(self) -> str | None:
        serving = None if self.registry is None else find_serving(self.registry)
        return None if serving is None else serving.version

    def _resolve(self, rounds: list[Round], current: Round) -> RoundSelection:
        registry = self.registry
        base, serving = (
            find_serving(registry, version) if registry and version else None
            for version in (current.base, current.serving)
        )
        inputs = RoundInputs(current, base, serving, self.hasher)
        stages = resolve_round(self.stages, self.shared, self.folder, inputs)
        repetition = Repetition(self.folder, self.repeat, rounds, current, self.hasher)
        return RoundSelection(repetition, stages, inspect_stages(stages))
