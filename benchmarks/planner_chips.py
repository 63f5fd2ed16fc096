"""Finds the chips of measured rows in the catalog of the planner."""

from __future__ import annotations

import re

from regauge.machines import machine_rates
from regauge.machines.catalog import load_chips
from regauge.machines.machine_rates import MachineRates

OTHER_NAMES = {
    "8xA100-class (see README)": "A100-SXM-40GB",
    "H100_94GB": "H100-SXM-96GB-HBM2e-500W (Meta Grand Teton)",
    "H100_96GB(500W)": "H100-SXM-96GB-HBM2e-500W (Meta Grand Teton)",
}
"""Names of measured rows from which the words do not lead to the chip."""
SERIES = {"rtx": 3}
"""Words of a name that must agree, for product lines whose first word names many chips."""
FORMS = ("pcie", "sxm")
"""Forms of a chip, which have other speeds."""
NETWORK = 400e9 / 8
"""Bytes per second between machines of sources that do not state it: 8 x 50 Gb/s."""
NETWORKS = {
    "A100_80GB": 1600e9 / 8,
    "A100_40GB": 1600e9 / 8,
    "H100_80GB": 3200e9 / 8,
    "H100_96GB(500W)": 3200e9 / 8,
    "H200_141GB": 3200e9 / 8,
    "Trainium1": 800e9 / 8,
}
UNKNOWN_BANDWIDTH, UNKNOWN_LINK = 7e11, 1.6e10
"""Bytes per second of a chip that the catalog lacks; such a chip has a memory plan alone."""


def find_chip(name: str) -> str | None:
    """Return the catalog's name of a chip such as h100_sxm or A100_40GB; None if it is unknown."""
    if name in OTHER_NAMES:
        return OTHER_NAMES[name]
    words = _split(name)
    number = SERIES.get(words[0], 1)
    chips = load_chips()
    names = [chip for chip in chips if _split(chip)[:number] == words[:number]]
    forms = {word for word in words if word in FORMS}
    names = [chip for chip in names if not forms or not _forms(chip) or forms & _forms(chip)]

    def likeness(chip: str) -> tuple[int, bool, float]:
        same = sum(word in _split(chip) for word in words)
        return same, "(" not in chip, chips[chip].memory_gb or 0.0

    return max(names, key=likeness, default=None)


def build_rates(name: str, devices: int) -> MachineRates | None:
    """Return a machine with chips of a name; None if neither catalog nor name has their memory.

    A chip that the catalog lacks has the memory of its name, such as A6000_48GB, and no peak.
    """
    chip = find_chip(name)
    network = NETWORKS.get(name, NETWORK)
    if chip is not None:
        return machine_rates.build_machine(name, chip, devices, network)
    gigabytes = re.search(r"[_-](\d+)GB", name)
    if gigabytes is None:
        return None
    size = int(gigabytes[1]) * machine_rates.GIB * machine_rates.USABLE_SHARE
    return MachineRates(name, name, devices, None, size, UNKNOWN_BANDWIDTH, UNKNOWN_LINK, network)


def _split(name: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", name.lower())


def _forms(chip: str) -> set[str]:
    return {form for form in FORMS if any(word.startswith(form) for word in _split(chip))}
