"""Dual encoder folders: the document encoder is stored in a subfolder of the query encoder.

model/              query encoder in transformers format, and the head
model/documents/    document encoder in transformers format
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from regauge.models.weights import WeightFileWriter, write_config_and_tokenizer
from regauge.system.hub import CONFIG

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor, nn
    from transformers import PretrainedConfig, PreTrainedModel

DOCUMENT_ENCODER = "documents"
"""Name of the document encoder's subfolder and module."""
QUERY_ENCODER = "model"
"""Name of the query encoder's module."""
DOCUMENT_PREFIX = f"{DOCUMENT_ENCODER}."


def is_document_weight(name: str) -> bool:
    return name.startswith(DOCUMENT_PREFIX)


def has_document_encoder(folder: Path) -> bool:
    """Return whether a model folder has a document encoder."""
    return (folder / DOCUMENT_ENCODER / CONFIG).is_file()


def encoder_folder(folder: Path, root: str) -> Path:
    """Return the weight folder of the encoder named `root`.

    If a folder has only one encoder, both encoders start with its weights.
    """
    if is_document_encoder(root) and has_document_encoder(folder):
        return folder / DOCUMENT_ENCODER
    return folder


def is_document_encoder(root: str) -> bool:
    """Return whether a model with this name in the module is the document encoder."""
    return root.rpartition(".")[2] == DOCUMENT_ENCODER


class DualEncoderWriter:
    """Writes a module's document encoder, if any, to its subfolder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / DOCUMENT_ENCODER
        self._files: WeightFileWriter | None = None

    def split_off(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Write the document encoder's weights, and yield all others."""
        for name, value in weights:
            if not is_document_weight(name):
                yield name, value
                continue
            if self._files is None:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._files = WeightFileWriter(self._folder)
            self._files.add(name.removeprefix(DOCUMENT_PREFIX), value)

    def finish(self, config: PretrainedConfig, tokenizer: Path) -> None:
        """Finish the weight files and add the configuration and the tokenizer."""
        if self._files is not None:
            self._files.finish()
            write_config_and_tokenizer(self._folder, config, tokenizer)


def iterate_encoders(
    module: nn.Module, folder: Path
) -> Iterator[tuple[Path, str, PreTrainedModel]]:
    """Yield each encoder's target folder, weight name prefix and model."""
    targets = {QUERY_ENCODER: folder, DOCUMENT_ENCODER: folder / DOCUMENT_ENCODER}
    for name, target in targets.items():
        model = getattr(module, name, None)
        if model is not None:
            yield target, f"{name}.", model
