"""Joules out of the kernel's counters, or none."""

from __future__ import annotations

from pathlib import Path

from regauge.inference.energy import Meter, counters


def zone(root: Path, name: str, called: str, microjoules: int, most: int = 1_000_000) -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    (folder / "name").write_text(f"{called}\n")
    (folder / "max_energy_range_uj").write_text(f"{most}\n")
    file = folder / "energy_uj"
    file.write_text(f"{microjoules}\n")
    return file


def test_packages_are_added_and_their_parts_are_not(tmp_path: Path) -> None:
    first = zone(tmp_path, "rapl:0", "package-0", 100_000)
    zone(tmp_path, "rapl:0:0", "core", 50_000)
    second = zone(tmp_path, "rapl:1", "package-1", 200_000)
    (tmp_path / "rapl").mkdir()
    found = counters(tmp_path)
    assert len(found) == 2
    meter = Meter(found)
    first.write_text("600000\n")
    second.write_text("450000\n")
    assert meter.joules() == 0.75


def test_a_counter_begins_again_beyond_its_largest_value(tmp_path: Path) -> None:
    file = zone(tmp_path, "rapl:0", "package-0", 999_000, most=999_999)
    meter = Meter(counters(tmp_path))
    file.write_text("1000\n")
    assert meter.joules() == 0.002


def test_without_counters_nothing_is_known(tmp_path: Path) -> None:
    assert counters(tmp_path / "none") == ()
    assert Meter(()).joules() is None


def test_a_package_that_cannot_be_read_makes_all_unknown(tmp_path: Path) -> None:
    zone(tmp_path, "rapl:0", "package-0", 5)
    zone(tmp_path, "rapl:1", "package-1", 5).write_text("denied")
    assert counters(tmp_path) == ()
