"""The fitted constants of the formulas, from `calibration.json`.

`benchmarks/fit_planner.py` writes the file from measured rows; nobody edits it. A constant belongs
to a chip and a software stack. A stack without rows gets the constants of its chip, and a chip
without rows those of all chips, with a wider interval.
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
"""Name of the chip or stack of the constants that stand in for unknown ones."""
ANY_KIND = {True: "any with fused attention", False: "any with stored scores"}
"""Names of the stacks that stand in for unknown ones, by whether their attention is fused."""
REINSTALL = "reinstall regauge"


@dataclass(frozen=True)
class StackConstants:
    """Speed of one chip under one software stack."""

    chip: str
    stack: str
    efficiency: float
    """Share of the peak that large matrix products achieve."""
    hidden_half: float
    """Hidden width at which a product achieves half of `efficiency`."""
    token_half: float
    """Tokens of a forward pass at which a product achieves half of `efficiency`."""
    attention_efficiency: float
    """Share of the peak that the attention achieves."""
    traffic: float
    """Times that a step moves each byte of the activations, besides matrix products."""
    overlap: float
    """Share of the computation behind which communication is hidden."""
    growth: float
    """Relative loss for each doubling of the machines."""
    fixed_seconds: float
    """Seconds of a step besides computation and communication."""
    spread: float
    """Standard deviation of log(measured / predicted) on rows that the fit did not see."""
    rows: int
    reference_flops: float
    """FLOP/s to which the efficiencies refer: the dense peak, or an arbitrary unit without one."""
    has_fused_attention: bool
    source: str


@dataclass(frozen=True)
class MemoryConstants:
    """What the formulas of the memory do not know of a software stack."""

    stack: str
    context_bytes: float
    fragmentation: float
    """Reserved bytes for each used byte; at least 1."""
    activation_scale: float
    """Measured activations for each byte of the formula."""
    spread: float
    rows: int
    source: str


@dataclass(frozen=True)
class LinkConstants:
    """What a link achieves of its nominal bandwidth."""

    system: str
    efficiency: float
    half_bytes: float
    latency_seconds: float
    source: str


@dataclass(frozen=True)
class PlannerConstants:
    """All fitted constants."""

    stacks: Mapping[tuple[str, str], StackConstants]
    memory: Mapping[str, MemoryConstants]
    links: Mapping[str, LinkConstants]

    def find_stack(
        self, chip: str, stack: str | None = None, *, is_fused: bool = True
    ) -> StackConstants:
        """Return the constants of a chip under a stack.

        Chips of one family, such as A100 with 40 and with 80 GB, stand in for each other. Without
        rows for the stack, the constants are those of the family's stacks with the same kind of
        attention; without rows for the family, those of all chips.
        """
        family = find_family(chip)
        kind = ANY_KIND[is_fused]
        names = [(name, stack) for name in (chip, family) if stack]
        names += [(family, kind), (family, ANY), (ANY, stack or ANY), (ANY, kind), (ANY, ANY)]
        for key in names:
            if key in self.stacks:
                return self.stacks[key]
        raise AssertionError(f"{CALIBRATION} has no constants for any chip")

    def find_memory(self, stack: str | None = None) -> MemoryConstants:
        """Return the constants of the memory under a stack, or those of all stacks."""
        return self.memory.get(stack or ANY, self.memory[ANY])

    def find_link(self, system: str, default: str) -> LinkConstants:
        """Return the constants of a system's link, or those of the default."""
        return self.links.get(system, self.links[default])


def find_family(chip: str) -> str:
    """Return the family of a chip: its name without form and memory, such as A100."""
    return chip.split("-", maxsplit=1)[0].split(" ", maxsplit=1)[0]


@cache
def load_calibration(path: Path = CALIBRATION) -> PlannerConstants:
    """Return the fitted constants; raises DataError if the file is damaged."""
    return parse_calibration(read_json(path, REINSTALL))


def parse_calibration(document: Mapping[str, Any]) -> PlannerConstants:
    """Return the constants of a document with the lists stacks, memory and links."""
    stacks = [StackConstants(**entry) for entry in document["stacks"]]
    memory = [MemoryConstants(**entry) for entry in document["memory"]]
    links = [LinkConstants(**entry) for entry in document["links"]]
    return PlannerConstants(
        {(entry.chip, entry.stack): entry for entry in stacks},
        {entry.stack: entry for entry in memory},
        {entry.system: entry for entry in links},
    )
