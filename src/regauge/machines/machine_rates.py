"""Catalog machines with their rates: FLOP/s, and bytes per second of memory and links."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from regauge.machines.catalog import find_instance, load_chips
from regauge.system.errors import SettingsError
from regauge.system.files import read_csv_rows
from regauge.system.units import GIGA, TERA

if TYPE_CHECKING:
    from collections.abc import Mapping

GIB = 2**30
USABLE_SHARE = 0.985
"""Share of a chip's nominal memory that a program can reserve: the driver keeps the rest."""
ECC_SHARE = 0.94
"""The same for chips that store error correction in their memory: an A10G has 22.5 of 24 GiB."""
ECC_CHIPS = ("T4", "A10", "A10G", "L4", "L40S")
BITS = 8
HOST_LINK = 16.0
"""GB/s between the chips in a machine whose link is unknown."""


@dataclass(frozen=True)
class MachineRates:
    """A machine type with what the formulas need. Rates are per second and per device."""

    name: str
    chip: str
    devices: int
    peak_flops: float | None
    """Dense bf16 (or fp16) FLOP/s for one chip; None if unpublished."""
    memory_bytes: float
    memory_bandwidth: float
    """Bytes per second to one chip's memory."""
    link_bandwidth: float
    """Bytes per second for one chip inside the machine, one direction."""
    network_bandwidth: float
    """Bytes per second between the whole machine and others."""
    usd_per_hour: float | None = None
    is_shared: bool = False
    """Whether devices are processes that share a CPU's cores, memory and peak."""


def find_rate(chip: str, precision: str) -> float | None:
    """Return a chip's TFLOP/s in `bf16`, `fp16`, `tf32`, `fp32` or `fp8`; None if unknown."""
    rate: float | None = getattr(load_chips().get(chip), f"{precision}_teraflops", None)
    return rate


def find_peak(machine: MachineRates, precision: str) -> float | None:
    """Return one device's dense FLOP/s in a precision; None if unpublished.

    `half` is bf16, or fp16 on chips without bf16. A machine outside the catalog has one measured
    peak, in the precision of its run. Without a rate, fp8 and tf32 are as fast as bf16 and fp32.
    """
    peak, chip = machine.peak_flops, machine.chip
    half = find_rate(chip, "bf16") or find_rate(chip, "fp16")
    if precision == "half" or peak is None or half is None:
        return peak
    rate = find_rate(chip, precision) or find_rate(chip, "fp32" if precision == "tf32" else "bf16")
    return peak * (rate or half) / half


def find_precision_obstacle(chip: str, precision: str) -> str | None:
    """Return why a chip cannot train in a precision; None if it can, or if rates are missing."""
    entry = load_chips().get(chip)
    if entry is None or entry.vendor != "NVIDIA" or precision in ("auto", "fp32"):
        return None
    rates = {name: find_rate(chip, name) for name in ("bf16", "fp16", "tf32", "fp8")}
    if rates.get(precision) or not any(rates.values()):
        return None
    usable = ", ".join((*(name for name, rate in rates.items() if rate), "fp32"))
    return f"{chip} has no {precision}: it has {usable}"


@cache
def load_cores() -> Mapping[str, int]:
    """Return chip -> cores, for chips whose cores programs address as devices."""
    rows = read_csv_rows(Path(__file__).with_name("cores.csv"))
    return {row["chip"]: int(row["cores"]) for row in rows}


def find_machine(name: str, key: str = "--on") -> MachineRates:
    """Return a catalog machine type.

    Raises SettingsError with the closest name if it is unknown, or without accelerators.
    """
    instance = find_instance(name, key)
    if not instance.chips or instance.chip not in load_chips():
        raise SettingsError(
            f"{key}: '{name}' has no accelerator in the catalog",
            "choose a type that `regauge catalog list` shows with chips",
        )
    network = (instance.network_gbit_per_s or 0) * GIGA / BITS
    return build_machine(name, instance.chip, instance.chips, network, instance.usd_per_hour)


def build_machine(
    name: str, chip: str, chips: int, network_bandwidth: float, usd_per_hour: float | None = None
) -> MachineRates:
    """Return a machine with catalog chips; `network_bandwidth` in bytes per second.

    Its devices are the cores that programs address; each has its share of a chip.

    Raises SettingsError if the chip's memory is unknown.
    """
    entry = load_chips()[chip]
    if not entry.memory_gb or not entry.bandwidth_gb_per_s:
        raise SettingsError(
            f"the catalog does not know the memory of '{chip}'", "choose another machine type"
        )
    peak = entry.bf16_teraflops or entry.fp16_teraflops
    cores = load_cores().get(chip, 1)
    share = ECC_SHARE if chip in ECC_CHIPS else USABLE_SHARE
    return MachineRates(
        name=name,
        chip=chip,
        devices=chips * cores,
        peak_flops=peak * TERA / cores if peak else None,
        memory_bytes=entry.memory_gb * GIB * share / cores,
        memory_bandwidth=entry.bandwidth_gb_per_s * GIGA / cores,
        link_bandwidth=(entry.link_gb_per_s or HOST_LINK) * GIGA / cores,
        network_bandwidth=network_bandwidth,
        usd_per_hour=usd_per_hour,
    )
