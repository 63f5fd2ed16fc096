"""The record of a pipeline's rounds, `rounds.json`, in its folder.

A round has fixed increments: the files that its stages read. The next round reads the files that no
finished round has read, so a refused model's files are read again.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import ConfigDict, Field

from regauge import config
from regauge.data.input_hashes import FileHashes
from regauge.system.json_files import DocumentShape

if TYPE_CHECKING:
    from collections.abc import Sequence

ROUNDS = "rounds.json"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
RoundState = Literal["running", "refused", "finished"]
PROJECTED_ROUNDS = 5
"""Number of recent rounds used to project durations."""


class RoundStage(DocumentShape):
    """A finished stage in a round."""

    name: str
    folder: str
    sha256: str
    seconds: float = Field(ge=0)
    is_reused: bool


class ClockReading(DocumentShape):
    """A machine's clocks at one time."""

    date: float
    """Seconds since 1970 in UTC, which may jump."""
    uptime: float
    """Seconds since the machine started, including suspended time."""
    boot: str
    """Identifier that changes when the machine restarts; empty if unknown."""

    def compute_elapsed(self, now: ClockReading) -> float:
        """Return the seconds until a later reading, at least 0, by the date after a restart."""
        if self.boot and self.boot == now.boot and now.uptime >= self.uptime:
            return now.uptime - self.uptime
        return max(0.0, now.date - self.date)


class Round(DocumentShape):
    """One pass through a pipeline's stages."""

    model_config = ConfigDict(frozen=True)

    number: int = Field(ge=1)
    state: RoundState
    began: ClockReading
    files: dict[str, FileHashes]
    """Stage -> increment files."""
    base: str | None
    """Start version for training, if any."""
    serving: str | None
    """Version to compare the new model with, if any."""
    refused_sha256: str | None = None
    """Input hash of the gate, if it refused the new model."""
    stages: list[RoundStage]
    """Finished stages."""

    def find_stage(self, name: str, sha256: str) -> RoundStage | None:
        """Return a finished stage with an input hash; None if it is not finished."""
        same = (item for item in self.stages if (item.name, item.sha256) == (name, sha256))
        return next(same, None)


class RoundsShape(DocumentShape):
    """`rounds.json` content."""

    rounds: list[Round]


def read_clocks() -> ClockReading:
    """Read this machine's clocks; without an uptime clock, the boot identifier is empty."""
    try:
        uptime = time.clock_gettime(time.CLOCK_BOOTTIME)
        boot = BOOT_ID.read_text(encoding="ascii").strip()
    except (AttributeError, OSError):
        uptime, boot = time.monotonic(), ""
    return ClockReading(date=time.time(), uptime=uptime, boot=boot)


def read_rounds(folder: Path) -> list[Round]:
    """Return a pipeline's rounds; raises DataError if the record is damaged."""
    path = folder / ROUNDS
    remedy = f"remove {path}; the next run begins with round 1 and keeps unchanged stages"
    document = config.find_document(path, remedy, RoundsShape)
    return [] if document is None else RoundsShape.model_validate(document).rounds


def save_round(folder: Path, rounds: Sequence[Round], current: Round) -> list[Round]:
    """Store a round beside the others, atomically; return all rounds."""
    others = [item for item in rounds if item.number != current.number]
    merged = sorted((*others, current), key=lambda item: item.number)
    folder.mkdir(parents=True, exist_ok=True)
    config.save(folder / ROUNDS, RoundsShape(rounds=merged).model_dump())
    return merged


def select_new_files(
    rounds: Sequence[Round], present: dict[str, FileHashes]
) -> dict[str, FileHashes] | None:
    """Return stage -> files for the next round; None if no file has arrived since the last one.

    `present` has all files by stage. A file is new if no finished round has read this content. A
    stage without new files reads its last round's files again, so it is unchanged.
    """
    selected: dict[str, FileHashes] = {}
    has_arrivals = False
    for stage, hashes in present.items():
        read = _list_contents(rounds, stage, "finished")
        seen = read | _list_contents(rounds[-1:], stage)
        new_files = {name: value for name, value in hashes.items() if (name, value) not in read}
        has_arrivals |= any(item not in seen for item in new_files.items())
        selected[stage] = new_files or _find_last_files(rounds, stage, hashes)
    return selected if has_arrivals else None


def _list_contents(
    rounds: Sequence[Round], stage: str, state: RoundState | None = None
) -> set[tuple[str, str]]:
    """Return the file names and hashes read in all rounds, or in those in one state."""
    return {
        item
        for entry in rounds
        if state is None or entry.state == state
        for item in entry.files.get(stage, {}).items()
    }


def _find_last_files(rounds: Sequence[Round], stage: str, present: FileHashes) -> FileHashes:
    files = (entry.files[stage] for entry in reversed(rounds) if entry.files.get(stage))
    return next(files, present)


def list_durations(rounds: Sequence[Round], stage: str) -> list[float]:
    """Return a stage's seconds in the last rounds in which it ran."""
    seconds = [
        item.seconds
        for entry in rounds
        for item in entry.stages
        if item.name == stage and not item.is_reused
    ]
    return seconds[-PROJECTED_ROUNDS:]
