"""A process that opens one foreign `.pt` file and writes its tensors as safetensors.

Run as `python -m regauge.checkpoint.unpickle FILE TARGET`; it has nothing else to lose.
"""

from __future__ import annotations

import sys

import torch
from safetensors.torch import save_file


def main(path: str, target: str) -> None:
    """Write the tensors of a state dict; raises for anything else in the file."""
    document = torch.load(path, map_location="cpu", weights_only=True)
    if isinstance(document, dict) and isinstance(document.get("state_dict"), dict):
        document = document["state_dict"]
    if not isinstance(document, dict):
        raise TypeError(f"it holds a {type(document).__name__}")
    others = [name for name, value in document.items() if not isinstance(value, torch.Tensor)]
    if others or not document:
        raise ValueError(f"'{others[0]}' is no tensor" if others else "it is empty")
    save_file({name: value.clone().contiguous() for name, value in document.items()}, target)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
