"""What a CPU says of its memory, from what the kernel writes, and of its speed."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from regauge import processes, timing
from regauge.accelerators import Precision, _peak_floor, cpu

GIB = 1 << 30
AMX = frozenset({"avx512f", "avx512_bf16", "amx_bf16", "fma", "avx", "sse2"})
CPUINFO = """\
processor\t: 0
model name\t: Intel(R) Xeon(R) Platinum 8480+ @ 2.00GHz
cpu MHz\t\t: 800.000
flags\t\t: fpu sse2 avx fma
"""


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[float]]]:
    """Return a function that sets the GFLOP/s of successive measurements, each with its size.

    The processor has AMX, two cores and 2 GHz. The function returns the seconds that measurements
    were told to last.
    """
    lengths: list[float] = []

    def script(*gigas: float) -> list[float]:
        results = iter(gigas)

        def measure(_: str, during: float) -> tuple[int, float]:
            lengths.append(during)
            rate = next(results)
            return int(rate), rate * 1e9

        monkeypatch.setattr(cpu, "_measure_matmul", measure)
        return lengths

    monkeypatch.setattr(cpu, "instructions", lambda: AMX)
    monkeypatch.setattr(_peak_floor, "read_clock_hz", lambda _: 2e9)
    monkeypatch.setattr(processes, "available_cores", lambda: 2)
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)
    monkeypatch.setattr(timing, "REPEAT_PAUSE_SECONDS", 0.0)
    cpu._fastest_matmul.cache_clear()
    yield script
    cpu._fastest_matmul.cache_clear()


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


def test_a_plausible_rate_is_measured_once(measured: Callable[..., list[float]]) -> None:
    lengths = measured(900.0)
    chip = cpu.Cpu().chip("bf16")
    assert chip.flops_per_second["bf16"] == 900e9
    assert chip.source == "measured here: 900 x 900 x 900 matmul on this process's threads"
    assert lengths == [cpu.MEASURED_SECONDS]


def test_an_implausible_rate_is_measured_again_until_one_is_plausible(
    measured: Callable[..., list[float]], caplog: pytest.LogCaptureFixture
) -> None:
    """1.8 GFLOP/s were seen of a processor that has 900 when it is idle."""
    caplog.set_level("INFO")
    lengths = measured(1.8, 3.0, 900.0)
    chip = cpu.Cpu().chip("bf16")
    assert chip.flops_per_second["bf16"] == 900e9
    assert chip.source.endswith("; the best of 3 measurements, the first was implausible")
    assert chip.source.startswith("measured here: 900 x 900 x 900 ")
    assert lengths == [cpu.MEASURED_SECONDS, *[cpu.REPEATED_SECONDS] * 2]
    (line,) = caplog.messages
    assert line == (
        "matmul in bf16: 1.8 GFLOP/s is implausible, expected 205 or more; measured again"
    )


def test_a_rate_that_stays_low_is_believed_in_the_end(
    measured: Callable[..., list[float]],
) -> None:
    """A hypervisor may hide the instructions that it names."""
    lengths = measured(2.0, 3.0, 2.5, 2.0, 1.0, 50.0)
    rates = cpu.Cpu().rates()
    assert rates["bf16"] == (3e9, 1 + timing.MAX_REPEATS)
    assert rates["fp32"] == (50e9, 1)
    assert lengths == [0] * 6


@pytest.mark.parametrize(
    ("precision", "flags", "floor"),
    [
        ("bf16", AMX, 0.05 * 2 * 2e9 * 1024),
        ("bf16", AMX - {"amx_bf16"}, 0.05 * 2 * 2e9 * 64),
        ("bf16", {"asimd", "bf16"}, 0.05 * 2 * 2e9 * 32),
        ("bf16", {"avx512f", "fma"}, 0),
        ("fp32", AMX, 0.05 * 2 * 2e9 * 32),
        ("fp32", {"sse2", "avx", "fma"}, 0.05 * 2 * 2e9 * 16),
        ("fp32", {"asimd"}, 0.05 * 2 * 2e9 * 8),
        ("fp32", {"sse2"}, 0.05 * 2 * 2e9 * 4),
        ("fp32", set(), 0),
        ("fp16", AMX, 0),
    ],
)
def test_the_floor_follows_from_instructions_cores_and_clock(
    precision: Precision, flags: set[str], floor: float
) -> None:
    rate = _peak_floor.min_plausible_rate(precision, frozenset(flags), 2, 2e9)
    assert rate == pytest.approx(floor)


@pytest.mark.parametrize(
    ("text", "clock"),
    [
        (CPUINFO, 2e9),
        (CPUINFO.replace(" @ 2.00GHz", ""), 8e8),
        ("processor\t: 0\nFeatures\t: fp asimd\n", 1e9),
        ("cpu MHz\t\t: 0.000\n", 1e9),
        (None, 1e9),
    ],
)
def test_the_clock_is_the_base_clock_or_the_present_one_or_one_gigahertz(
    tmp_path: Path, text: str | None, clock: float
) -> None:
    path = tmp_path / "cpuinfo"
    if text is not None:
        path.write_text(text)
    assert _peak_floor.read_clock_hz(path) == clock


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
