"""Encodes texts with sentence-transformers, as an alternating program.

python benchmarks/peer_encode.py FOLDER MODEL TEXTS [--style default|bf16|openvino-int8|onnx-int8]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from turns import Turn

from regauge.accelerators.cpu import Cpu

STYLES: dict[str, dict[str, Any]] = {
    "default": {},
    "bf16": {"model_kwargs": {"dtype": torch.bfloat16}},
    "openvino-int8": {
        "backend": "openvino",
        "model_kwargs": {"file_name": "openvino/openvino_model_qint8_quantized.xml"},
    },
    "onnx-int8": {"backend": "onnx", "model_kwargs": {"file_name": "onnx/model_qint8.onnx"}},
}


def main() -> None:
    """Encode all texts in each turn, with the default options of `encode`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("texts", type=Path)
    parser.add_argument("--style", choices=STYLES, default="default")
    options = parser.parse_args()
    texts = [json.loads(line)["text"] for line in options.texts.read_text().splitlines()]
    model = SentenceTransformer(str(options.model), device="cpu", **STYLES[options.style])
    turn = Turn(options.folder, Cpu())
    turn.wait()
    while True:
        model.encode(texts, convert_to_numpy=True)
        turn.stop()
        turn.end(count=len(texts))


if __name__ == "__main__":
    main()
