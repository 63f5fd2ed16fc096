"""Local TPU chips on the PCI bus; does not import torch."""

from __future__ import annotations

from pathlib import Path

PCI_DEVICES = Path("/sys/bus/pci/devices")
GOOGLE_PCI_VENDOR = "0x1ae0"
TPU_PCI_DEVICES = frozenset({"0x0027", "0x005e", "0x0062", "0x0063", "0x006f"})
"""PCI device IDs of TPU v2 or v3, v4, v5p, v5e and v6e."""


def count_tpu_chips() -> int:
    num_chips = 0
    for device in PCI_DEVICES.glob("*"):
        try:
            vendor, product = (
                (device / name).read_text(encoding="utf-8").strip() for name in ("vendor", "device")
            )
        except OSError:
            continue
        num_chips += vendor == GOOGLE_PCI_VENDOR and product in TPU_PCI_DEVICES
    return num_chips
