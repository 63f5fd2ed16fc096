"""Latency and throughput of two large encoders, ELECTRA-large and BERT-large.

They have their published sizes and random weights, which do not change the speed. Each is exported
in every requested precision. `regauge benchmark` measures all of them in a closed loop, with batch
sizes 1 and 10 and lengths 256 and 128.

    python benchmarks/infer_large.py [--precisions fp32 bf16] [--backend NAME] [--repeats N]
                                     [--seconds S] [--usd-per-hour USD] [--json OUT]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from predict import PACKAGED_MODEL, find_packaged_model, run_regauge, save_model
from recording import RESULTS, write_result
from transformers import BertConfig, BertModel, ElectraConfig, ElectraModel

from regauge.accelerators.cpu import Cpu

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LARGE_SIZES: dict[str, Any] = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
}
"""Sizes of both: Devlin et al., 2019, section 3; Clark et al., 2020, table 6."""
EXPORT_OPTIONS = (
    "text.max_seq_length=256",
    "buckets.lengths=[128,256]",
    "parity.num_texts=16",
    "parity.batch_invariance=false",
)
ARTIFACT_KEYS = (
    "name",
    "backend_description",
    "versions",
    "startup",
    "peak_memory_bytes",
    "price",
    "peak_flops_per_second",
    "peak_source",
)
"""Figures of an artifact that are written."""


def main() -> None:
    """Build, export and measure the models, and write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--precisions", nargs="+", default=Cpu().precisions())
    parser.add_argument("--backend", default="inductor", help="backend of the artifacts")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="duration of each loop")
    parser.add_argument("--usd-per-hour", type=float, help="price of this machine")
    parser.add_argument("--json", type=Path, default=RESULTS / "infer_large.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        artifacts = [
            _export(name, model, (precision, options.backend), folder)
            for name, model in (("ELECTRA-large", build_electra()), ("BERT-large", build_bert()))
            for precision in options.precisions
        ]
        out = folder / "benchmark"
        overrides = [
            f"inference.repeats={options.repeats}",
            f"inference.duration_seconds={options.seconds}",
            "open_loop.load_fractions=[]",
            f"output.folder={out}",
        ]
        if options.usd_per_hour:
            overrides.append(f"execution.price.usd_per_hour={options.usd_per_hour}")
        sys.stdout.write(run_regauge("benchmark", *map(str, artifacts), *overrides))
        benchmark = json.loads((out / "benchmark.json").read_text())
    figures = {
        "tokenizer": PACKAGED_MODEL,
        "repeats": benchmark["repeats"],
        "artifacts": [
            {key: artifact[key] for key in ARTIFACT_KEYS} for artifact in benchmark["artifacts"]
        ],
        "rows": benchmark["rows"],
        "ratios": benchmark["ratios"],
    }
    chip = Cpu().chip_peak(options.precisions[0])
    write_result(options.json, "large encoders", chip, figures, "transformers")


def build_bert() -> PreTrainedModel:
    """Return BERT-large."""
    torch.manual_seed(0)
    return BertModel(BertConfig(**LARGE_SIZES), add_pooling_layer=False)


def build_electra() -> PreTrainedModel:
    """Return the discriminator of ELECTRA-large."""
    torch.manual_seed(0)
    return ElectraModel(ElectraConfig(**LARGE_SIZES, embedding_size=1024))


def _export(name: str, model: PreTrainedModel, candidate: tuple[str, str], folder: Path) -> Path:
    """Return the artifact of a model for a candidate: a precision and a backend."""
    precision, backend = candidate
    origin, artifact = folder / name, folder / f"{name} {precision}"
    if not origin.exists():
        save_model(model, find_packaged_model(), origin)
    overrides = [f'candidates.precisions=["{precision}"]', f'candidates.backends=["{backend}"]']
    run_regauge(
        "export", "--model", str(origin), "--to", str(artifact), *EXPORT_OPTIONS, *overrides
    )
    return artifact


if __name__ == "__main__":
    main()
