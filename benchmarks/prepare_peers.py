"""How fast text becomes rows of tokens here, by `datasets.map`, and by `tokenizers` alone.

The same text and tokenizer, each way a command of its own, in turns: `regauge prepare` with
hashes, a split and a manifest, once where only equal records are kept on one side of the split,
and once by default, where near-duplicates are, which no other way looks for; `datasets.map` that
tokenises and then groups to rows, in batches and two processes, as the examples of Trainer do it;
and nothing but `encode_batch` on all cores. Whole commands are timed.

    python benchmarks/prepare_peers.py [--text FILE] [--megabytes N] [--turns N] [--length N]
                                       [--json OUT]
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

from peers import HERE, OURS, faster
from prepare import MEGA, make, size, tables
from recording import RESULTS, keep
from turns import Program

from regauge.accelerators.cpu import Cpu
from regauge.data import settings, tokenizer

GOALS = {"map": 3.0, "encode": 0.8}
"""How many times as fast it has to be as each way of peers."""
SIMILARITIES = {"equal records together": 1.0, "near-duplicates together": 0.7}
"""What `prepare` does beside rows, and from which similarity on; peers do neither."""
NAMES = {"map": "datasets.map", "encode": "tokenizers alone"}
VOCABULARY = 16384
SAMPLE = 20_000
"""Texts that the tokenizer is trained on."""
PACKAGES = ("tokenizers", "datasets", "transformers")


def main() -> None:
    """Prepare the text again and again in each of the ways, and write what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--text", type=Path, help="by default the documentation of this Python")
    parser.add_argument("--megabytes", type=int, default=200, help="of text; it is repeated")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--length", type=int, default=512, help="tokens of a row")
    parser.add_argument("--turns", type=int, default=6, help="of each way; one is a warm-up")
    parser.add_argument("--json", type=Path, default=RESULTS / "prepare_peers.json")
    own = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        scratch = Path(temporary)
        text, words = scratch / "text", scratch / "tokenizer"
        make(text, own.megabytes, own.text)
        trained(text, words)
        own_ways = [ours(scratch, what, own) for what in SIMILARITIES]
        others = [theirs(scratch, way, own) for way in NAMES]
        programs = [*own_ways, *others]
        read = size(text) / MEGA
        for number in range(own.turns):
            for program in programs:
                program.turns.append(timed(program, read))
                shown = program.turns[-1]
                sys.stderr.write(f"{number} {program.name}: {shown}\n")
    measured = [
        {
            "beside": what,
            "programs": {each.name: each.speed() | counted(each) for each in (one, *others)},
            "against": {other.name: faster(one, other) for other in others},
        }
        for what, one in zip(SIMILARITIES, own_ways, strict=True)
    ]
    figures = {"megabytes": round(read, 1), "processes": own.processes, "measured": measured}
    title = "prepare beside datasets.map and tokenizers"
    keep(own.json, title, Cpu().chip_peak("fp32"), figures, *PACKAGES)


def trained(text: Path, folder: Path) -> None:
    """Train the tokenizer of all ways on the first texts."""
    with next(iter(sorted(text.glob("*.jsonl")))).open(encoding="utf-8") as file:
        found = [json.loads(line)["text"] for line in islice(file, SAMPLE)]
    tokenizer.train_tokenizer(
        iter([found]), settings.TokenizerSettings(vocab_size=VOCABULARY), folder
    )


def ours(scratch: Path, what: str, own: argparse.Namespace) -> Program:
    """Return the command that prepares the text here, in one of the own ways."""
    folder = scratch / what.replace(" ", "-")
    wanted = tables(scratch / "text", folder / "dataset", own.processes)
    wanted |= {"rows": {"length": own.length}, "tokenizer": {"path": str(scratch / "tokenizer")}}
    wanted |= {"split": {"similarity": SIMILARITIES[what]}}
    del wanted["filter"]  # peers have none
    file = folder.with_suffix(".json")
    file.write_text(json.dumps(wanted))
    command = [sys.executable, "-m", "regauge", "prepare", str(file), "--json"]
    return Program(OURS, command, folder, unit="megabytes")


def theirs(scratch: Path, way: str, own: argparse.Namespace) -> Program:
    """Return the command of another way."""
    folder = scratch / way
    places = [str(folder), str(scratch / "text"), str(scratch / "tokenizer")]
    options = ["--way", way, "--processes", str(own.processes), "--length", str(own.length)]
    command = [sys.executable, str(HERE / "peer_prepare.py"), *places, *options]
    return Program(NAMES[way], command, folder, unit="megabytes", goal=GOALS[way])


def timed(program: Program, megabytes: float) -> dict[str, Any]:
    """Run a command in an empty folder; return its seconds and the tokens that came of it."""
    program.folder.mkdir()
    began = time.perf_counter()
    done = subprocess.run(program.command, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - began
    shutil.rmtree(program.folder)
    if done.returncode:
        raise SystemExit(f"{program.name} failed: {done.stderr}")
    answer = json.loads(done.stdout)
    tokens = sum(value for name, value in answer.items() if name.endswith("tokens"))
    phases = [line for line in done.stderr.splitlines() if " in " in line]
    return {"count": megabytes, "seconds": seconds, "tokens": tokens, "phases": phases}


def counted(program: Program) -> dict[str, Any]:
    """Return how many tokens a way made, and what the last turn said of its parts."""
    last = program.turns[-1]
    return {"tokens": last["tokens"], "phases": last["phases"]}


if __name__ == "__main__":
    main()
