"""What a CPU says of its memory, from what the kernel writes, and of its speed."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from regauge.accelerators import cpu

GIB = 1 << 30


def group(folder: Path, limit: str, used: int, files: int) -> None:
    folder.mkdir()
    (folder / "memory.max").write_text(limit)
    (folder / "memory.current").write_text(str(used))
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {files}\n")


def test_a_control_group_limits_what_can_be_had_and_read_files_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group(tmp_path / "group", str(3 * GIB), 2 * GIB, GIB // 2)
    place = (tmp_path / "group", "memory.max", "memory.current", "inactive_file")
    monkeypatch.setattr(cpu, "GROUPS", ((tmp_path / "none", *place[1:]), place))
    assert cpu._left_of_group() == 3 * GIB // 2
    found = cpu.Cpu().memory_bytes(2)
    assert found is not None
    assert found <= 3 * GIB // 4


def test_features_are_sets_of_instructions_that_programs_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flags = {"sse4_2", "avx512_bf16", "amx_int8", "f16c", "asimddp", "sve2", "i8mm"}
    others = {"sme", "smep", "smap", "syscall", "nx", "aes"}
    monkeypatch.setattr(cpu, "instructions", lambda: frozenset(flags | others))
    assert cpu.Cpu().features() == flags | {platform.machine()}


def test_a_group_without_a_limit_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group(tmp_path / "group", "max", 2 * GIB, 0)
    place = (tmp_path / "group", "memory.max", "memory.current", "inactive_file")
    monkeypatch.setattr(cpu, "GROUPS", (place,))
    assert cpu._left_of_group() is None
    whole = cpu.Cpu().memory_bytes(1)
    available = cpu._kilobytes(Path("/proc/meminfo"), "MemAvailable")
    assert whole is not None
    assert available is not None
    assert whole == pytest.approx(available * 1024, rel=0.5)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the peak of a program")
def test_the_peak_of_a_process_is_its_own_and_not_that_of_the_one_that_started_it() -> None:
    program = "from regauge.accelerators.cpu import Cpu; print(Cpu().peak_memory_bytes())"
    filled = bytearray(300 << 20)
    filled[::4096] = b"x" * len(filled[::4096])
    told = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=lambda: None,  # so that it is forked, and not spawned
    )
    assert int(told.stdout) < 200 << 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 > len(filled)


def test_matrices_are_no_larger_than_there_is_time_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large product is minutes in a precision that the processor has no instructions for."""
    monkeypatch.setattr(cpu, "MEASURED_SECONDS", 0.0)
    monkeypatch.setattr(cpu, "ENOUGH_SECONDS", 0.0)
    cpu._fastest_matmul.cache_clear()
    chip = cpu.Cpu().chip("fp32")
    cpu._fastest_matmul.cache_clear()
    assert "192 x 192 x 192 matmul" in chip.source
    assert chip.flops_per_second["fp32"] > 0


def test_libraries_that_a_machine_left_empty_are_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "ab"
    folder.mkdir(parents=True)
    names = ("abandoned.so", "under-way.so", "whole.so", "empty.txt")
    abandoned, under_way, whole, other = (folder / name for name in names)
    for path in (abandoned, under_way, other):
        path.touch()
    whole.write_bytes(b"\x7fELF")
    for path in (abandoned, whole, other):
        os.utime(path, (0, 0))
    cpu.remove_abandoned(tmp_path / "cache")
    assert sorted(folder.iterdir()) == sorted((under_way, whole, other))
    cpu.remove_abandoned(tmp_path / "none")


def test_a_graph_is_compiled_beside_no_library_that_was_left_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever compiles asks for the backend first, whether it was ordered or found to pay."""
    abandoned = tmp_path / "abandoned.so"
    abandoned.touch()
    os.utime(abandoned, (0, 0))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    cpu.Cpu().compile_backend()
    assert not abandoned.exists()
