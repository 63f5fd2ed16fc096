"""Fitted formula constants, from `calibration.json`.

`benchmarks/fit_planner.py` writes the file from measured rows; do not edit it. A constant belongs
to a chip and a software stack. A stack without rows gets its chip's constants. A chip without rows
has those of its vendor's most similar chip, or else those for all chips, with a wider interval.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from regauge.system.json_files import read_json

CALIBRATION = Path(__file__).with_name("calibration.json")
ANY = "any"
"""Chip or stack name for constants that stand in for unknown ones."""
ANY_KIND = {True: "any with fused attention", False: "any with stored scores"}
"""Stand-in stack name for unknown stacks, by whether attention is fused."""
REINSTALL = "reinstall regauge"


@dataclass(frozen=True)
class StackConstants:
    """One chip's speed under one software stack."""

    chip: str
    stack: str
    efficiency: float
    """Share of the peak achieved by large matrix products."""
    hidden_half: float
    """Hidden width at which a product achieves half of `efficiency`."""
    token_half: float
    """Tokens per forward pass at which a product achieves half of `efficiency`."""
    attention_efficiency: float
    """Share of the peak achieved by attention."""
    traffic: float
    """How often a step moves each activation byte, besides matrix products."""
    overlap: float
    """Share of the computation that hides communication."""
    growth: float
    """Relative loss per doubling of the machines."""
    fixed_seconds: float
    """Seconds per step besides computation and communication."""
    spread: float
    """Standard deviation of log(measured / predicted) on rows not used in the fit."""
    rows: int
    reference_flops: float
    """FLOP/s to which the efficiencies refer: the dense peak, or an arbitrary unit without one."""
    has_fused_attention: bool
    source: str


@dataclass(frozen=True)
class MemoryConstants:
    """What the memory formulas do not know about a software stack."""

    stack: str
    context_bytes: float
    fragmentation: float
    """Reserved bytes for each used byte; at least 1."""
    activation_scale: float
    """Measured activations per byte from the formula."""
    spread: float
    rows: int
    source: str


@dataclass(frozen=True)
class LinkConstants:
    """What a link achieves compared with its nominal bandwidth."""

    system: str
    efficiency: float
    half_bytes: float
    latency_seconds: float
    source: str


@dataclass(frozen=True)
class PlannerConstants:
    stacks: Mapping[tuple[str, str], StackConstants]
    memory: Mapping[str, MemoryConstants]
    links: Mapping[str, LinkConstants]

    def find_stack(
        self, chip: str, stack: str | None = None, *, is_fused: bool = True
    ) -> StackConstants:
        """Return a chip's constants under a stack.

        Chips in one family, such as A100 with 40 and with 80 GB, stand in for each other. Without
        rows for the stack, the family's stacks with the same kind of attention are used; without
        rows for the family, all chips.
        """
        family = find_family(chip)
        kind = ANY_KIND[is_fused]
        names = [(name, stack) for name in (chip, family) if stack]
        names += [(family, kind), (family, ANY), (ANY, stack or ANY), (ANY, kind), (ANY, ANY)]
        for key in names:
            if key in self.stacks:
                return self.stacks[key]
        raise AssertionError(f"{CALIBRATION} has no constants for any chip")

    def has_rows(self, chip: str) -> bool:
        """Return whether rows were measured on a chip's family."""
        names = (chip, find_family(chip))
        return any(entry.rows for (name, _), entry in self.stacks.items() if name in names)

    def find_memory(self, stack: str | None = None) -> MemoryConstants:
        """Return the memory constants under a stack, or those for all stacks."""
        return self.memory.get(stack or ANY, self.memory[ANY])

    def find_link(self, system: str, default: str) -> LinkConstants:
        return self.links.get(system, self.links[default])


def find_family(chip: str) -> str:
    """Return a chip's family: the name without form and memory, such as A100."""
    return chip.split("-", maxsplit=1)[0].split(" ", maxsplit=1)[0]


@cache
def load_calibration(path: Path = CALIBRATION) -> PlannerConstants:
    """Return the fitted constants; raises DataError if the file is damaged."""
    return parse_calibration(read_json(path, REINSTALL))


def parse_calibration(document: Mapping[str, Any]) -> PlannerConstants:
    stacks = [StackConstants(**entry) for entry in document["stacks"]]
    memory = [MemoryConstants(**entry) for entry in document["memory"]]
    links = [LinkConstants(**entry) for entry in document["links"]]
    return PlannerConstants(
        {(entry.chip, entry.stack): entry for entry in stacks},
        {entry.stack: entry for entry in memory},
        {entry.system: entry for entry in links},
    )
