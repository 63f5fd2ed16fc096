"""Writes safetensors files with the same permissions as any other new file."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from safetensors.torch import save_file

from regauge.system.files import open_in_place

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

PYTORCH_METADATA = {"format": "pt"}
"""Header metadata required by transformers."""


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] = PYTORCH_METADATA
) -> None:
    """Write tensors to a safetensors file; contiguous host tensors are not copied.

    `save_file` renames a temporary file readable only by its owner. The mode is corrected here.
    """
    os.close(open_in_place(path, os.O_WRONLY | os.O_CREAT))
    mode = stat.S_IMODE(path.stat().st_mode)
    host_tensors = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    save_file(host_tensors, path, metadata=dict(metadata))
    path.chmod(mode)
