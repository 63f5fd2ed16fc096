"""How fast a gigabyte of text is prepared, in how much memory and on how much disk.

The text is that of the installed Python, repeated: in each copy of a document some of its words are
others, so that some copies are near-duplicates and most are not. `regauge prepare` reads it in
processes of its own, which are looked at while they work.

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
import text
from recording import RESULTS, keep

from regauge.accelerators.cpu import Cpu

MEGA = 1e6
FILE_BYTES = 50 * 2**20
EDITS = (0.01, 0.1, 0.2, 0.4)
"""Shares of the words that are others in a copy, each as likely; 0.1 of them leave a similarity of
0.57, below that of near-duplicates."""
SECONDS_BETWEEN_LOOKS = 0.2
SECONDS_BETWEEN_DISK_LOOKS = 5.0
FACTS = ("VmRSS", "RssAnon", "VmHWM")


def main() -> None:
    """Make the text if it is not there, prepare it, and write what that took."""
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
            make(text, arguments.megabytes)
        figures = prepared(text, scratch / "dataset", arguments.processes)
    keep(arguments.json, "prepare of text on this machine", Cpu().chip_peak("fp32"), figures)


def make(folder: Path, megabytes: int, file: Path | None = None) -> None:
    """Write so many megabytes of JSON lines of a text, in files of 50 MiB."""
    aside = folder.with_name(f"{folder.name}.unfinished")
    aside.mkdir(parents=True, exist_ok=True)
    total, number = 0, 0
    lines = _lines(file)
    while total < megabytes * MEGA:
        with (aside / f"{number:04d}.jsonl").open("w", encoding="utf-8") as part:
            while part.tell() < FILE_BYTES and total + part.tell() < megabytes * MEGA:
                part.writelines(next(lines) for _ in range(100))
            total += part.tell()
        number += 1
    aside.rename(folder)


def _lines(file: Path | None) -> Iterator[str]:
    """Yield the documents again and again, each time with other words in them."""
    texts = list(dict.fromkeys(text.texts(file)))
    words = sorted({word for each in texts[:5000] for word in each.split()})
    random = np.random.default_rng(0)
    copy = 0
    while True:
        for each in texts:
            share = EDITS[random.integers(len(EDITS))] if copy else 0.0
            yield json.dumps({"text": _edited(each, share, words, random), "copy": copy}) + "\n"
        copy += 1


def _edited(text: str, share: float, words: list[str], random: np.random.Generator) -> str:
    parts = text.split(" ")
    count = int(np.ceil(share * len(parts)))
    places, others = random.integers(0, [[len(parts)], [len(words)]], (2, count)).tolist()
    for place, other in zip(places, others, strict=True):
        parts[place] = words[other]
    return " ".join(parts)


@dataclass
class Looks:
    """The largest values seen of a command's processes, while it ran."""

    root: int
    work: Path
    peaks: dict[int, dict[str, int]] = field(default_factory=lambda: defaultdict(dict))
    tree: dict[str, int] = field(default_factory=dict)
    disk_bytes: int = 0
    done: threading.Event = field(default_factory=threading.Event)

    def watch(self) -> None:
        """Look again and again until it is done."""
        disk_at = 0.0
        while not self.done.wait(SECONDS_BETWEEN_LOOKS):
            found = {pid: facts for pid in _tree(self.root) if (facts := _memory(pid))}
            for pid, facts in found.items():
                _raise_to(self.peaks[pid], facts)
            sums = {name: sum(facts[name] for facts in found.values()) for name in FACTS}
            _raise_to(self.tree, sums)
            if time.monotonic() - disk_at > SECONDS_BETWEEN_DISK_LOOKS:
                disk_at = time.monotonic()
                self.disk_bytes = max(self.disk_bytes, size(self.work))


def _raise_to(peaks: dict[str, int], values: dict[str, int]) -> None:
    for name, value in values.items():
        peaks[name] = max(peaks.get(name, 0), value)


def _tree(root: int) -> list[int]:
    """Return a process and all below it."""
    children = defaultdict(list)
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            after_name = path.read_text().rpartition(") ")[2].split()
        except OSError:
            continue
        children[int(after_name[1])].append(int(path.parent.name))
    found = [root]
    for pid in found:
        found.extend(children[pid])
    return found


def _memory(pid: int) -> dict[str, int]:
    """Return what a process has in memory, in bytes; nothing for one that is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    values = dict(line.split(":", 1) for line in lines)
    if "VmRSS" not in values:
        return {}
    return {name: int(values[name].split()[0]) * 1024 for name in FACTS}


def size(folder: Path) -> int:
    """Return the bytes of the files below a folder."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:
            continue
    return total


def prepared(text: Path, dataset: Path, processes: int) -> dict[str, Any]:
    """Prepare a folder of text, and return what that took."""
    file = dataset.with_suffix(".json")
    file.write_text(json.dumps(tables(text, dataset, processes)))
    command = [sys.executable, "-m", "regauge", "prepare", str(file), "--json"]
    began = time.monotonic()
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    looks = Looks(child.pid, dataset.with_name(f"{dataset.name}.partial"))
    watcher = threading.Thread(target=looks.watch)
    watcher.start()
    out, said = child.communicate()
    looks.done.set()
    watcher.join()
    if child.returncode:
        raise SystemExit(said)
    seconds = time.monotonic() - began
    processor_seconds = _processor_seconds()
    read = size(text)
    answer = json.loads(out)
    return {
        "megabytes": round(read / MEGA, 1),
        "processes": processes,
        "seconds": round(seconds, 1),
        "megabytes_per_second": round(read / MEGA / seconds, 2),
        "processor_seconds": round(processor_seconds, 1),
        "megabytes_per_processor_second": round(read / MEGA / processor_seconds, 2),
        "phases": [line for line in said.splitlines() if " in " in line or "records" in line],
        "peak_memory_mb": {
            "each": [_rounded(peaks) for peaks in looks.peaks.values()],
            "together": _rounded(looks.tree),
        },
        "disk_mb": {
            "while_it_works": round(looks.disk_bytes / MEGA),
            "dataset": round(size(dataset) / MEGA),
        },
        "dataset": {name: answer[name] for name in ("train_rows", "heldout_rows", "skipped")},
        "identity": answer["identity"],
    }


def tables(folder: Path, dataset: Path, processes: int) -> dict[str, Any]:
    """Return the run file that prepares a folder of JSON lines."""
    return {
        "data": {"path": str(dataset)},
        "source": {"kind": "jsonl", "files": [f"{folder}/*.jsonl"]},
        "filter": {"min_words": 3},
        "rows": {"length": 256},
        "prepare": {"processes": processes},
    }


def _processor_seconds() -> float:
    """Return the processor's time of the processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _rounded(peaks: dict[str, int]) -> dict[str, int]:
    return {name: round(value / MEGA) for name, value in peaks.items()}


if __name__ == "__main__":
    main()
