"""Text into tokens as others do it: one command of `prepare_peers.py`.

python benchmarks/peer_prepare.py FOLDER TEXT TOKENIZER [--way map|encode] [--processes N]
                                  [--length N]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

TEXTS_AT_A_TIME = 1000
"""What `datasets.map` takes by itself."""


def main() -> None:
    """Do it, and say how many tokens came of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--way", choices=("map", "encode"), default="map")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--length", type=int, default=512)
    own = parser.parse_args()
    files = [str(path) for path in sorted(own.text.glob("*.jsonl"))]
    tokens = mapped(files, own) if own.way == "map" else encoded(files, own.tokenizer)
    sys.stdout.write(json.dumps({"tokens": tokens}))


def mapped(files: list[str], own: argparse.Namespace) -> int:
    """Tokenise, then group to rows, by `datasets.map`."""
    import datasets
    import transformers

    datasets.disable_progress_bars()
    tokenizer = transformers.AutoTokenizer.from_pretrained(own.tokenizer)
    found = datasets.load_dataset(
        "json", data_files=files, split="train", cache_dir=str(own.folder / "cache")
    )
    each = {"batched": True, "num_proc": own.processes}
    columns = found.column_names
    tokens = found.map(partial(_tokenised, tokenizer), remove_columns=columns, **each)
    rows = tokens.map(partial(_grouped, own.length), **each)
    return int(rows.num_rows * own.length)


def encoded(files: list[str], tokenizer: Path) -> int:
    """Encode some texts at a time on all cores; nothing is kept."""
    import tokenizers

    opened = tokenizers.Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    return sum(sum(map(len, opened.encode_batch_fast(texts))) for texts in _together(files))


def _together(files: list[str]) -> Iterator[list[str]]:
    gathered: list[str] = []
    for name in files:
        with Path(name).open(encoding="utf-8") as file:
            for line in file:
                gathered.append(json.loads(line)["text"])
                if len(gathered) == TEXTS_AT_A_TIME:
                    yield gathered
                    gathered = []
    yield gathered


def _tokenised(tokenizer: Any, batch: dict[str, list[str]]) -> Any:
    return tokenizer(batch["text"])


def _grouped(length: int, batch: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
    """Return the columns of a batch as one stream each, cut into rows; the rest is dropped."""
    streams = {name: list(chain.from_iterable(lists)) for name, lists in batch.items()}
    last = len(next(iter(streams.values()))) // length * length
    return {
        name: [stream[at : at + length] for at in range(0, last, length)]
        for name, stream in streams.items()
    }


if __name__ == "__main__":
    main()
