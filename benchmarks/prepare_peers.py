"""Tokenization throughput, compared with `datasets.map` and with `tokenizers`.

All commands use the same text and tokenizer, alternate, and are timed completely. `regauge prepare`
writes hashes, a split and a manifest. One variant keeps exact duplicates on one side of the split;
the other, the default, also keeps near-duplicates there, which no peer detects. `datasets.map`
tokenizes and then groups to rows, in batches and two processes, as in the examples of Trainer.
`tokenizers` only runs `encode_batch` on all cores.

    python benchmarks/prepare_peers.py [--text FILE] [--megabytes N] [--repeats N] [--length N]
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

from peers import HERE, REGAUGE, compare_speed
from prepare import MEGA, build_tables, folder_size, write_text
from recording import RESULTS, write_result
from turns import Program

from regauge.accelerators.cpu import Cpu
from regauge.data.settings import TokenizerSettings
from regauge.data.tokenizer import train_tokenizer

GOALS = {"map": 3.0, "encode": 0.8}
"""Speedup that must be reached over each method of a peer."""
SIMILARITIES = {"exact duplicates grouped": 1.0, "near-duplicates grouped": 0.7}
"""Variants of `prepare`: the similarity from which records are grouped; peers do not group."""
LABELS = {"map": "datasets.map", "encode": "tokenizers"}
"""Name of each method in the results."""
VOCABULARY = 16384
NUM_TOKENIZER_TEXTS = 20_000
"""Texts for the training of the tokenizer."""
PACKAGES = ("tokenizers", "datasets", "transformers")


def main() -> None:
    """Prepare the text repeatedly with each program, and write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--text", type=Path, help="text file; default: docs of this Python")
    parser.add_argument("--megabytes", type=int, default=200, help="of repeated text")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--length", type=int, default=512, help="tokens per row")
    parser.add_argument("--repeats", type=int, default=6, help="of each program; one is a warm-up")
    parser.add_argument("--json", type=Path, default=RESULTS / "prepare_peers.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        scratch = Path(temporary)
        text, tokenizer = scratch / "text", scratch / "tokenizer"
        write_text(text, options.megabytes, options.text)
        train_common_tokenizer(text, tokenizer)
        variants = [build_regauge_program(scratch, name, options) for name in SIMILARITIES]
        peers = [build_peer_program(scratch, method, options) for method in LABELS]
        megabytes = folder_size(text) / MEGA
        for index in range(options.repeats):
            for program in (*variants, *peers):
                repeat = time_program(program, megabytes)
                program.turns.append(repeat)
                sys.stderr.write(f"{index} {program.name}: {repeat}\n")
    workloads = [
        {
            "variant": name,
            "programs": {
                program.name: program.summarize_speed() | read_counts(program)
                for program in (variant, *peers)
            },
            "peers": {peer.name: compare_speed(variant, peer) for peer in peers},
        }
        for name, variant in zip(SIMILARITIES, variants, strict=True)
    ]
    figures = {
        "megabytes": round(megabytes, 1),
        "processes": options.processes,
        "workloads": workloads,
    }
    title = "prepare compared with datasets.map and tokenizers"
    write_result(options.json, title, Cpu().chip_peak("fp32"), figures, *PACKAGES)


def train_common_tokenizer(text: Path, folder: Path) -> None:
    """Train the tokenizer of all programs on the first texts."""
    with next(iter(sorted(text.glob("*.jsonl")))).open(encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line in islice(file, NUM_TOKENIZER_TEXTS)]
    train_tokenizer(iter([texts]), TokenizerSettings(vocab_size=VOCABULARY), folder)


def build_regauge_program(scratch: Path, variant: str, options: argparse.Namespace) -> Program:
    """Return the command that prepares the text with Regauge, in one variant."""
    folder = scratch / variant.replace(" ", "-")
    tables = build_tables(scratch / "text", folder / "dataset", options.processes)
    tables["rows"] = {"length": options.length}
    tables["tokenizer"] = {"path": str(scratch / "tokenizer")}
    tables["split"] = {"similarity": SIMILARITIES[variant]}
    del tables["filter"]  # peers do not filter
    file = folder.with_suffix(".json")
    file.write_text(json.dumps(tables))
    command = [sys.executable, "-m", "regauge", "prepare", str(file), "--json"]
    return Program(REGAUGE, command, folder, unit="megabytes")


def build_peer_program(scratch: Path, method: str, options: argparse.Namespace) -> Program:
    """Return the command of a peer."""
    folder = scratch / method
    paths = [str(folder), str(scratch / "text"), str(scratch / "tokenizer")]
    script = [sys.executable, str(HERE / "peer_prepare.py"), *paths, "--method", method]
    numbers = ["--processes", str(options.processes), "--length", str(options.length)]
    command = [*script, *numbers]
    return Program(LABELS[method], command, folder, unit="megabytes", goal=GOALS[method])


def time_program(program: Program, megabytes: float) -> dict[str, Any]:
    """Run a command in an empty folder; return its seconds and the number of its tokens."""
    program.folder.mkdir()
    began = time.perf_counter()
    done = subprocess.run(program.command, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - began
    shutil.rmtree(program.folder)
    if done.returncode:
        raise SystemExit(f"{program.name} failed: {done.stderr}")
    result = json.loads(done.stdout)
    tokens = sum(value for name, value in result.items() if name.endswith("tokens"))
    phases = [line for line in done.stderr.splitlines() if " in " in line]
    return {"count": megabytes, "seconds": seconds, "tokens": tokens, "phases": phases}


def read_counts(program: Program) -> dict[str, Any]:
    """Return the number of tokens and the phases of the last repeat."""
    last = program.turns[-1]
    return {"tokens": last["tokens"], "phases": last["phases"]}


if __name__ == "__main__":
    main()
