"""The CPU accelerator: its memory as the kernel reports it, and its measured speed."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from regauge.accelerators import Precision, _host_counters, _matmul_rates, cpu
from regauge.system import processes, timing

GIB = 1 << 30
AMX = frozenset({"avx512f", "avx512_bf16", "amx_bf16", "fma", "avx", "sse2"})
CPUINFO = """\
processor\t: 0
model name\t: Intel(R) Xeon(R) Platinum 8480+ @ 2.00GHz
cpu MHz\t\t: 800.000
flags\t\t: fpu sse2 avx fma
"""


sizes: list[int] = []
"""Smallest sizes of the scripted measurements."""


@pytest.fixture
def script_measurements(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[float]]]:
    """Return a function that sets the GFLOP/s of successive measurements, each with its size.

    The processor has AMX, two cores and 2 GHz. The function returns the requested durations of the
    measurements, in seconds.
    """
    durations: list[float] = []
    sizes.clear()

    def script(*gigas: float) -> list[float]:
        results = iter(gigas)

        def measure(_: str, min_seconds: float, min_size: int) -> tuple[int, float]:
            durations.append(min_seconds)
            sizes.append(min_size)
            rate = next(results)
            return int(rate), rate * 1e9

        monkeypatch.setattr(cpu, "_measure_matmul", measure)
        return durations

    monkeypatch.setattr(cpu, "instructions", lambda: AMX)
    monkeypatch.setattr(_matmul_rates, "read_clock_hz", lambda _: 2e9)
    monkeypatch.setattr(processes, "available_cores", lambda: 2)
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)
    monkeypatch.setattr(timing, "REPEAT_PAUSE_SECONDS", 0.0)
    cpu._fastest_matmul.cache_clear()
    yield script
    cpu._fastest_matmul.cache_clear()


def write_cgroup(folder: Path, limit: str, used: int, cached: int) -> None:
    folder.mkdir()
    (folder / "memory.max").write_text(limit)
    (folder / "memory.current").write_text(str(used))
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cached}\n")


def test_a_control_group_limits_the_memory_and_page_cache_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_cgroup(tmp_path / "group", str(3 * GIB), 2 * GIB, GIB // 2)
    cgroup = (tmp_path / "group", "memory.max", "memory.current", "inactive_file")
    monkeypatch.setattr(cpu, "CGROUPS", ((tmp_path / "none", *cgroup[1:]), cgroup))
    assert cpu._free_cgroup_bytes() == 3 * GIB // 2
    share = cpu.Cpu().memory_bytes(2)
    assert share is not None
    assert share <= 3 * GIB // 4


def test_features_are_the_instruction_sets_for_numerical_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flags = {"sse4_2", "avx512_bf16", "amx_int8", "f16c", "asimddp", "sve2", "i8mm"}
    others = {"sme", "smep", "smap", "syscall", "nx", "aes"}
    monkeypatch.setattr(cpu, "instructions", lambda: frozenset(flags | others))
    assert cpu.Cpu().features() == flags | {platform.machine()}


def test_a_control_group_without_a_limit_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_cgroup(tmp_path / "group", "max", 2 * GIB, 0)
    cgroup = (tmp_path / "group", "memory.max", "memory.current", "inactive_file")
    monkeypatch.setattr(cpu, "CGROUPS", (cgroup,))
    assert cpu._free_cgroup_bytes() is None
    memory = cpu.Cpu().memory_bytes(1)
    available = _host_counters.read_kibibytes(Path("/proc/meminfo"), "MemAvailable")
    assert memory is not None
    assert available is not None
    assert memory == pytest.approx(available * 1024, rel=0.5)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports the peak of a program")
def test_the_peak_of_a_process_excludes_the_memory_of_its_parent() -> None:
    program = "from regauge.accelerators.cpu import Cpu; print(Cpu().peak_memory_bytes())"
    filled = bytearray(300 << 20)
    filled[::4096] = b"x" * len(filled[::4096])
    process = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=lambda: None,  # so that the process is forked instead of spawned
    )
    assert int(process.stdout) < 200 << 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 > len(filled)


def test_the_size_of_the_matrices_is_limited_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large product takes minutes in a precision without hardware instructions."""
    monkeypatch.setattr(cpu, "MEASURE_SECONDS", 0.0)
    monkeypatch.setattr(cpu, "MIN_SECONDS", 0.0)
    monkeypatch.setattr(_matmul_rates, "min_plausible_rate", lambda *_: 0.0)
    cpu._fastest_matmul.cache_clear()
    chip = cpu.Cpu().chip_peak("fp32")
    cpu._fastest_matmul.cache_clear()
    assert "192 x 192 x 192 matmul" in chip.source
    assert chip.flops_per_second["fp32"] > 0


def test_a_plausible_rate_is_measured_once(script_measurements: Callable[..., list[float]]) -> None:
    durations = script_measurements(900.0)
    chip = cpu.Cpu().chip_peak("bf16")
    assert chip.flops_per_second["bf16"] == 900e9
    assert chip.source == "measured here: 900 x 900 x 900 matmul on this process's threads"
    assert durations == [cpu.MEASURE_SECONDS]


def test_an_implausible_rate_is_measured_again_until_one_is_plausible(
    script_measurements: Callable[..., list[float]], caplog: pytest.LogCaptureFixture
) -> None:
    """1.8 GFLOP/s were measured on a loaded processor that reaches 900 when it is idle."""
    caplog.set_level("INFO")
    durations = script_measurements(1.8, 3.0, 900.0)
    chip = cpu.Cpu().chip_peak("bf16")
    assert chip.flops_per_second["bf16"] == 900e9
    assert chip.source.endswith("; best of 3 measurements, since the first was implausible")
    assert chip.source.startswith("measured here: 900 x 900 x 900 ")
    assert durations == [cpu.MEASURE_SECONDS, *[cpu.REPEAT_SECONDS] * 2]
    (line,) = caplog.messages
    assert line == (
        "matrix products in bf16 were slow, 1.8 GFLOP/s instead of at least 205, and were measured"
        " again; other programs may use the machine"
    )


def test_a_rate_that_stays_low_is_accepted(
    script_measurements: Callable[..., list[float]],
) -> None:
    """A hypervisor may report instructions that cannot be used."""
    durations = script_measurements(2.0, 3.0, 2.5, 2.0, 1.0, 50.0)
    rates = [cpu.Cpu().chip_peak(precision) for precision in ("bf16", "fp32")]
    assert rates[0].flops_per_second == {"bf16": 3e9}
    assert rates[1].flops_per_second == {"fp32": 50e9}
    assert f"best of {1 + timing.MAX_REPEATS} measurements" in rates[0].source
    assert durations == [cpu.MEASURE_SECONDS, *[cpu.REPEAT_SECONDS] * 4, cpu.MEASURE_SECONDS]
    assert sizes == [cpu.MIN_SIZE, *[cpu.REPEAT_SIZE] * 4, cpu.MIN_SIZE]


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
def test_the_floor_depends_on_instructions_cores_and_clock(
    precision: Precision, flags: set[str], floor: float
) -> None:
    rate = _matmul_rates.min_plausible_rate(precision, frozenset(flags), 2, 2e9)
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
def test_the_clock_is_the_base_clock_or_the_current_one_or_one_gigahertz(
    tmp_path: Path, text: str | None, clock: float
) -> None:
    path = tmp_path / "cpuinfo"
    if text is not None:
        path.write_text(text)
    assert _matmul_rates.read_clock_hz(path) == clock


def test_abandoned_empty_libraries_are_removed(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "ab"
    folder.mkdir(parents=True)
    names = ("abandoned.so", "unfinished.so", "complete.so", "empty.txt")
    abandoned, unfinished, complete, other = (folder / name for name in names)
    for path in (abandoned, unfinished, other):
        path.touch()
    complete.write_bytes(b"\x7fELF")
    for path in (abandoned, complete, other):
        os.utime(path, (0, 0))
    cpu.remove_abandoned(tmp_path / "cache")
    assert sorted(folder.iterdir()) == sorted((unfinished, complete, other))
    cpu.remove_abandoned(tmp_path / "none")


def test_the_compile_backend_removes_abandoned_libraries_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every compilation first requests the backend, whether it is explicit or automatic."""
    abandoned = tmp_path / "abandoned.so"
    abandoned.touch()
    os.utime(abandoned, (0, 0))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    cpu.Cpu().compile_backend()
    assert not abandoned.exists()
