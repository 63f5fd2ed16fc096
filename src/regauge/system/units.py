"""Conversion factors between units."""

from __future__ import annotations

SECONDS_PER_MINUTE = 60
SECONDS_PER_HOUR = 3600
MIB = 2**20
MILLION = 1e6
MEGA, GIGA, TERA = 1e6, 1e9, 1e12
