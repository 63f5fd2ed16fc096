"""Checks for an image: what may differ between two builds."""

from __future__ import annotations

from collections.abc import Iterator

from regauge.jobs.clusters.pins import Pins
from regauge.jobs.lints import Lint, build_lint


def check_image(base: str, pins: Pins) -> Iterator[Lint]:
    """Warn about a base image that its publisher can replace, and packages without a pin."""
    if "@sha256:" not in base:
        yield build_lint("image-base", base=base)
    if pins.unpinned:
        yield build_lint("image-pins", names=", ".join(pins.unpinned))
