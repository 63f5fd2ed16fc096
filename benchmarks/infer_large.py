"""Latency and rate of the two large encoders that generations of accelerators are compared by.

ELECTRA-large and BERT-large have their published widths and random weights: how fast they are does
not depend on their values. Each is exported in every precision that is asked for, and all are
measured by `regauge benchmark`, one request after the other: 1 and 10 rows, of 256 and 128 tokens.

    python benchmarks/infer_large.py [--precisions fp32 bf16] [--backend NAME] [--turns N]
                                     [--seconds S] [--usd-per-hour USD] [--json OUT]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from predict import PACKAGED, packaged, run, saved
from recording import RESULTS, keep
from transformers import BertConfig, BertModel, ElectraConfig, ElectraModel

from regauge.accelerators.cpu import Cpu

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LARGE = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
}
"""Of both: Devlin et al., 2019, section 3; Clark et al., 2020, table 6."""
EXPORT = (
    "text.max_seq_length=256",
    "buckets.lengths=[128,256]",
    "parity.num_texts=16",
    "parity.batch_invariance=false",
)


def main() -> None:
    """Make, export and measure the models, and write what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--precisions", nargs="+", default=Cpu().precisions())
    parser.add_argument("--backend", default="inductor", help="what computes them")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each load")
    parser.add_argument("--usd-per-hour", type=float, help="of this machine; by default unknown")
    parser.add_argument("--json", type=Path, default=RESULTS / "infer_large.json")
    own = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        artifacts = [
            _exported(name, model, (precision, own.backend), folder)
            for name, model in (("ELECTRA-large", electra()), ("BERT-large", bert()))
            for precision in own.precisions
        ]
        out = folder / "benchmark"
        asked = [f"inference.repeats={own.turns}", f"inference.duration_seconds={own.seconds}"]
        asked += ["open_loop.load_fractions=[]", f"output.folder={out}"]
        if own.usd_per_hour:
            asked.append(f"execution.price.usd_per_hour={own.usd_per_hour}")
        sys.stdout.write(run("benchmark", *map(str, artifacts), *asked))
        found = json.loads((out / "benchmark.json").read_text())
    kept = ("name", "computed_by", "versions", "ready", "memory_bytes", "price")
    kept += ("peak_flops_per_second", "peak_source")
    figures = {
        "tokenizer": PACKAGED,
        "turns": found["turns"],
        "artifacts": [{name: each[name] for name in kept} for each in found["artifacts"]],
        "rows": found["rows"],
        "beside": found["beside"],
    }
    keep(own.json, "large encoders", Cpu().chip_peak(own.precisions[0]), figures, "transformers")


def bert() -> PreTrainedModel:
    """Return BERT-large."""
    torch.manual_seed(0)
    return BertModel(BertConfig(**LARGE), add_pooling_layer=False)


def electra() -> PreTrainedModel:
    """Return ELECTRA-large, the discriminator."""
    torch.manual_seed(0)
    return ElectraModel(ElectraConfig(**LARGE, embedding_size=1024))


def _exported(name: str, model: PreTrainedModel, way: tuple[str, str], folder: Path) -> Path:
    """Return the artifact of a model in a precision, by a backend."""
    precision, backend = way
    origin, artifact = folder / name, folder / f"{name} {precision}"
    if not origin.exists():
        saved(model, packaged(), origin)
    tried = [f'candidates.precisions=["{precision}"]', f'candidates.backends=["{backend}"]']
    run("export", "--model", str(origin), "--to", str(artifact), *EXPORT, *tried)
    return artifact


if __name__ == "__main__":
    main()
