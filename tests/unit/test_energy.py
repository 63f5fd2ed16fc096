"""Energy meters: the counters of the kernel."""

from __future__ import annotations

from pathlib import Path

from regauge.accelerators import _host_counters


def write_zone(
    root: Path, folder_name: str, name: str, microjoules: int, max_microjoules: int = 1_000_000
) -> Path:
    """Write a powercap zone; return the file of its counter."""
    folder = root / folder_name
    folder.mkdir(parents=True)
    (folder / "name").write_text(f"{name}\n")
    (folder / "max_energy_range_uj").write_text(f"{max_microjoules}\n")
    file = folder / "energy_uj"
    file.write_text(f"{microjoules}\n")
    return file


def test_the_counters_of_packages_are_added_without_their_subzones(tmp_path: Path) -> None:
    first = write_zone(tmp_path, "rapl:0", "package-0", 100_000)
    write_zone(tmp_path, "rapl:0:0", "core", 50_000)
    second = write_zone(tmp_path, "rapl:1", "package-1", 200_000)
    (tmp_path / "rapl").mkdir()
    meter = _host_counters.start_energy_meter(tmp_path)
    assert meter is not None
    first.write_text("600000\n")
    second.write_text("450000\n")
    assert meter() == 0.75


def test_a_counter_restarts_after_its_largest_value(tmp_path: Path) -> None:
    file = write_zone(tmp_path, "rapl:0", "package-0", 999_000, max_microjoules=999_999)
    meter = _host_counters.start_energy_meter(tmp_path)
    assert meter is not None
    file.write_text("1000\n")
    assert meter() == 0.002


def test_without_counters_there_is_no_meter(tmp_path: Path) -> None:
    assert _host_counters.start_energy_meter(tmp_path / "none") is None


def test_one_unreadable_package_disables_the_meter(tmp_path: Path) -> None:
    write_zone(tmp_path, "rapl:0", "package-0", 5)
    write_zone(tmp_path, "rapl:1", "package-1", 5).write_text("denied")
    assert _host_counters.start_energy_meter(tmp_path) is None
