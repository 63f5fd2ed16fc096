"""A second encoder, of documents, beside that of queries: a folder of its own inside the first's.

model/              the encoder of queries, as transformers loads it, and the head
model/documents/    the encoder of documents, as transformers loads it
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from regauge.models.hub import CONFIG
from regauge.models.weights import Files, describe

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor, nn
    from transformers import PretrainedConfig, PreTrainedModel

FOLDER = "documents"
"""Also what the second encoder is called in the module that holds both."""
FIRST = "model"
"""What the first encoder is called there."""
OF_DOCUMENTS = f"{FOLDER}."


def of_documents(name: str) -> bool:
    """Return whether a weight of a module is one of its second encoder."""
    return name.startswith(OF_DOCUMENTS)


def there(folder: Path) -> bool:
    """Return whether a folder holds a second encoder."""
    return (folder / FOLDER / CONFIG).is_file()


def folder_of(folder: Path, root: str) -> Path:
    """Return where an encoder of a module lies: both begin alike where a folder has only one."""
    return folder / FOLDER if is_one(root) and there(folder) else folder


def is_one(root: str) -> bool:
    """Return whether a model is called the second encoder in a module."""
    return root.rpartition(".")[2] == FOLDER


class Beside:
    """Takes the weights of a second encoder out of those of a module, and writes its folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / FOLDER
        self._files: Files | None = None

    def rest(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights that are not of the second encoder."""
        for name, value in weights:
            if not of_documents(name):
                yield name, value
                continue
            if self._files is None:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._files = Files(self._folder)
            self._files.add(name.removeprefix(OF_DOCUMENTS), value)

    def finish(self, config: PretrainedConfig, tokenizer: Path) -> None:
        """Write what is left, if there is a second encoder at all."""
        if self._files is not None:
            self._files.finish()
            describe(self._folder, config, tokenizer)


def encoders(module: nn.Module, folder: Path) -> Iterator[tuple[Path, str, PreTrainedModel]]:
    """Yield the place of each encoder of a module, how its weights are named, and the encoder."""
    for name, place in ((FIRST, folder), (FOLDER, folder / FOLDER)):
        model = getattr(module, name, None)
        if model is not None:
            yield place, f"{name}.", model
