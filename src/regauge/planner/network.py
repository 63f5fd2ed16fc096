"""Collective times: ring algorithms with a bandwidth that grows with the message.

time = latency + f S / B(S), B(S) = Bmax S / (S + S_half). f is 2 (n - 1) / n for an all-reduce and
(n - 1) / n for the others. S: bytes in the whole message; Bmax: bytes per second for one device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from regauge.planner.calibration import LinkConstants

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "alltoall"]


@dataclass(frozen=True)
class Link:
    """One device's link: what it achieves, and how fast it gets there."""

    bandwidth: float
    """One device's achieved bytes per second for a large message."""
    half_size: float
    """Message bytes that achieve half the bandwidth."""
    latency: float
    """Seconds for an empty message."""

    def seconds(self, collective: Collective, size: float, devices: int) -> float:
        """Return the seconds for a collective over `devices` devices with `size` bytes."""
        if devices <= 1 or size <= 0:
            return 0.0
        moved = ring_factor(collective, devices) * (size + self.half_size)
        return self.latency + moved / self.bandwidth


def ring_factor(collective: Collective, devices: int) -> float:
    """Return the bytes that a ring moves through one device, per message byte."""
    return (2.0 if collective == "all_reduce" else 1.0) * (devices - 1) / devices


def build_link(nominal: float, constants: LinkConstants) -> Link:
    """Return what a link with a nominal bandwidth achieves."""
    bandwidth = nominal * constants.efficiency
    return Link(bandwidth, constants.half_bytes, constants.latency_seconds)


@dataclass(frozen=True)
class Topology:
    """Machines with equal devices: a link inside each machine, and a network between them."""

    inside: Link
    between: Link
    devices: int
    """How many devices in one machine take part."""
    machines: int = 1

    def seconds(self, collective: Collective, size: float, messages: float = 1.0) -> float:
        """Return the seconds for `size` bytes over all devices, divided into equal messages.

        The slower link decides. The ring between machines moves 1 / devices of the message per
        device, which is the whole message per machine.
        """
        count = max(messages, 1.0)
        local = self.inside.seconds(collective, size / count, self.devices)
        return count * max(local, self.between.seconds(collective, size / count, self.machines))
