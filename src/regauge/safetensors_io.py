"""Files of tensors: safetensors with the permissions of any other new file."""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING

from safetensors.torch import save_file

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

FORMAT = {"format": "pt"}
"""What transformers wants to find in a header."""


def write(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, str] = FORMAT) -> None:
    """Write tensors, from where they lie if that is on the host and contiguous.

    safetensors writes aside and renames, which leaves files that only their owner may read.
    """
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    own = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    save_file(own, path, metadata=dict(facts))
    path.chmod(mode)
