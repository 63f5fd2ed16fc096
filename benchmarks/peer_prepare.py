"""Tokenizes text with `datasets.map` or `tokenizers`: a command of `prepare_peers.py`.

python benchmarks/peer_prepare.py FOLDER TEXT TOKENIZER [--method map|encode] [--processes N]
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

TEXTS_PER_BATCH = 1000
"""The default of `datasets.map`."""


def main() -> None:
    """Tokenize the text, and print the number of tokens."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--method", choices=("map", "encode"), default="map")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--length", type=int, default=512)
    options = parser.parse_args()
    files = [str(path) for path in sorted(options.text.glob("*.jsonl"))]
    tokens = (
        map_files(files, options)
        if options.method == "map"
        else encode_files(files, options.tokenizer)
    )
    sys.stdout.write(json.dumps({"tokens": tokens}))


def map_files(files: list[str], options: argparse.Namespace) -> int:
    """Tokenize and then group to rows with `datasets.map`; return the number of tokens."""
    import datasets
    import transformers

    datasets.disable_progress_bars()
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.tokenizer)
    records = datasets.load_dataset(
        "json", data_files=files, split="train", cache_dir=str(options.folder / "cache")
    )
    common = {"batched": True, "num_proc": options.processes}
    columns = records.column_names
    tokens = records.map(partial(_tokenize, tokenizer), remove_columns=columns, **common)
    rows = tokens.map(partial(_group_rows, options.length), **common)
    return int(rows.num_rows * options.length)


def encode_files(files: list[str], tokenizer_folder: Path) -> int:
    """Encode batches of texts on all cores; return the number of tokens."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    return sum(sum(map(len, tokenizer.encode_batch_fast(texts))) for texts in _read_batches(files))


def _read_batches(files: list[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    for name in files:
        with Path(name).open(encoding="utf-8") as file:
            for line in file:
                batch.append(json.loads(line)["text"])
                if len(batch) == TEXTS_PER_BATCH:
                    yield batch
                    batch = []
    yield batch


def _tokenize(tokenizer: Any, batch: dict[str, list[str]]) -> Any:
    return tokenizer(batch["text"])


def _group_rows(length: int, batch: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
    """Return each column of a batch as one stream that is cut into rows; the rest is dropped."""
    streams = {name: list(chain.from_iterable(lists)) for name, lists in batch.items()}
    end = len(next(iter(streams.values()))) // length * length
    return {
        name: [stream[start : start + length] for start in range(0, end, length)]
        for name, stream in streams.items()
    }


if __name__ == "__main__":
    main()
