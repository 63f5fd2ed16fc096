"""Throughput, peak memory and peak disk usage of `regauge prepare` on a gigabyte of text.

The text is the documentation of the installed Python, repeated. Each copy of a document has some
random words replaced, so that some copies are near-duplicates and most are not. The processes of
`regauge prepare` are sampled while they run.

    python benchmarks/prepare.py [--megabytes N] [--processes N] [--scratch FOLDER] [--json OUT]
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from recording import RESULTS, write_result
from text import read_texts

from regauge.accelerators.cpu import Cpu

MEGA = 1e6
FILE_BYTES = 50 * 2**20
REPLACED_SHARES = (0.01, 0.1, 0.2, 0.4)
"""Shares of the words that are replaced in a copy, equally likely.

0.1 leaves a similarity of 0.57, below the threshold of near-duplicates."""
SAMPLE_SECONDS = 0.2
DISK_SAMPLE_SECONDS = 5.0
MEMORY_FIELDS = ("VmRSS", "RssAnon", "VmHWM")


def main() -> None:
    """Write the text unless it exists, prepare it, and write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--scratch", type=Path)
    parser.add_argument("--json", type=Path, default=RESULTS / "prepare.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        scratch = arguments.scratch or Path(temporary)
        text = scratch / f"text-{arguments.megabytes}"
        if not text.exists():
            write_text(text, arguments.megabytes)
        figures = measure_prepare(text, scratch / "dataset", arguments.processes)
    write_result(
        arguments.json, "prepare of text on this machine", Cpu().chip_peak("fp32"), figures
    )


def write_text(folder: Path, megabytes: int, file: Path | None = None) -> None:
    """Write JSON lines of a text until they have `megabytes`, in files of 50 MiB."""
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    unfinished.mkdir(parents=True, exist_ok=True)
    total, index = 0, 0
    lines = _build_lines(file)
    while total < megabytes * MEGA:
        with (unfinished / f"{index:04d}.jsonl").open("w", encoding="utf-8") as output:
            while output.tell() < FILE_BYTES and total + output.tell() < megabytes * MEGA:
                output.writelines(next(lines) for _ in range(100))
            total += output.tell()
        index += 1
    unfinished.rename(folder)


def _build_lines(file: Path | None) -> Iterator[str]:
    """Yield the documents repeatedly, with other replaced words in each copy."""
    texts = list(dict.fromkeys(read_texts(file)))
    words = sorted({word for text in texts[:5000] for word in text.split()})
    generator = np.random.default_rng(0)
    copy = 0
    while True:
        for text in texts:
            index = generator.integers(len(REPLACED_SHARES)) if copy else None
            share = 0.0 if index is None else REPLACED_SHARES[index]
            copied = _replace_words(text, share, words, generator)
            yield json.dumps({"text": copied, "copy": copy}) + "\n"
        copy += 1


def _replace_words(
    text: str, share: float, words: list[str], generator: np.random.Generator
) -> str:
    parts = text.split(" ")
    count = int(np.ceil(share * len(parts)))
    positions, numbers = generator.integers(0, [[len(parts)], [len(words)]], (2, count)).tolist()
    for position, number in zip(positions, numbers, strict=True):
        parts[position] = words[number]
    return " ".join(parts)


@dataclass
class Sampler:
    """Samples the processes of a command and its folder; keeps the largest values."""

    root: int
    folder: Path
    peaks: dict[int, dict[str, int]] = field(default_factory=lambda: defaultdict(dict))
    total_peaks: dict[str, int] = field(default_factory=dict)
    disk_bytes: int = 0
    done: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Sample until `done` is set."""
        disk_sampled_at = 0.0
        while not self.done.wait(SAMPLE_SECONDS):
            processes = {
                pid: memory for pid in _list_processes(self.root) if (memory := _read_memory(pid))
            }
            for pid, memory in processes.items():
                _update_peaks(self.peaks[pid], memory)
            totals = {
                name: sum(memory[name] for memory in processes.values()) for name in MEMORY_FIELDS
            }
            _update_peaks(self.total_peaks, totals)
            if time.monotonic() - disk_sampled_at > DISK_SAMPLE_SECONDS:
                disk_sampled_at = time.monotonic()
                self.disk_bytes = max(self.disk_bytes, folder_size(self.folder))


def _update_peaks(peaks: dict[str, int], values: dict[str, int]) -> None:
    for name, value in values.items():
        peaks[name] = max(peaks.get(name, 0), value)


def _list_processes(root: int) -> list[int]:
    """Return a process and all its descendants."""
    children = defaultdict(list)
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(") ")[2].split()
        except OSError:
            continue
        children[int(fields[1])].append(int(path.parent.name))
    pids = [root]
    for pid in pids:
        pids.extend(children[pid])
    return pids


def _read_memory(pid: int) -> dict[str, int]:
    """Return the memory of a process in bytes; empty if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    values = dict(line.split(":", 1) for line in lines)
    if "VmRSS" not in values:
        return {}
    return {name: int(values[name].split()[0]) * 1024 for name in MEMORY_FIELDS}


def folder_size(folder: Path) -> int:
    """Return the total bytes of the files in a folder and its subfolders."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:
            continue
    return total


def measure_prepare(text: Path, dataset: Path, processes: int) -> dict[str, Any]:
    """Prepare a folder of text; return time, throughput, memory and disk usage."""
    file = dataset.with_suffix(".json")
    file.write_text(json.dumps(build_tables(text, dataset, processes)))
    command = [sys.executable, "-m", "regauge", "prepare", str(file), "--json"]
    began = time.monotonic()
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    sampler = Sampler(child.pid, dataset.with_name(f"{dataset.name}.partial"))
    thread = threading.Thread(target=sampler.run)
    thread.start()
    out, log = child.communicate()
    sampler.done.set()
    thread.join()
    if child.returncode:
        raise SystemExit(log)
    seconds = time.monotonic() - began
    processor_seconds = _read_processor_seconds()
    num_bytes = folder_size(text)
    result = json.loads(out)
    return {
        "megabytes": round(num_bytes / MEGA, 1),
        "processes": processes,
        "seconds": round(seconds, 1),
        "megabytes_per_second": round(num_bytes / MEGA / seconds, 2),
        "processor_seconds": round(processor_seconds, 1),
        "megabytes_per_processor_second": round(num_bytes / MEGA / processor_seconds, 2),
        "phases": [line for line in log.splitlines() if " in " in line or "records" in line],
        "peak_memory_mb": {
            "by_process": [_to_megabytes(peaks) for peaks in sampler.peaks.values()],
            "total": _to_megabytes(sampler.total_peaks),
        },
        "disk_mb": {
            "peak": round(sampler.disk_bytes / MEGA),
            "dataset": round(folder_size(dataset) / MEGA),
        },
        "dataset": {name: result[name] for name in ("train_rows", "heldout_rows", "skipped")},
        "fingerprint": result["fingerprint"],
    }


def build_tables(folder: Path, dataset: Path, processes: int) -> dict[str, Any]:
    """Return the tables of a run file that prepares a folder of JSON lines."""
    return {
        "data": {"path": str(dataset)},
        "source": {"kind": "jsonl", "files": [f"{folder}/*.jsonl"]},
        "filter": {"min_words": 3},
        "rows": {"length": 256},
        "prepare": {"processes": processes},
    }


def _read_processor_seconds() -> float:
    """Return the CPU time of the child processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _to_megabytes(peaks: dict[str, int]) -> dict[str, int]:
    return {name: round(value / MEGA) for name, value in peaks.items()}


if __name__ == "__main__":
    main()
