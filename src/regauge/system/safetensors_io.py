"""Maps safetensors files as arrays, and writes them with the permissions of any other new file.

The header is a JSON document after its length in 8 bytes; the tensors follow (safetensors format,
https://github.com/huggingface/safetensors#format). Only arrays need numpy.
"""

from __future__ import annotations

import json
import mmap
import os
import stat
from typing import TYPE_CHECKING, NamedTuple

from regauge.system.files import open_in_place

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import numpy as np
    from torch import Tensor

PYTORCH_METADATA = {"format": "pt"}
"""Header metadata required by transformers."""
HEADER_LENGTH_BYTES = 8
BLOCK_BYTES = 2**20
"""Bytes that a comparison reads at a time."""
DTYPES = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "BOOL": "?",
    **{f"I{8 * size}": f"<i{size}" for size in (1, 2, 4, 8)},
    **{f"U{8 * size}": f"<u{size}" for size in (1, 2, 4, 8)},
}
"""Dtype in the header -> NumPy dtype of the stored numbers."""


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] = PYTORCH_METADATA
) -> None:
    """Write tensors to a safetensors file; contiguous host tensors are not copied.

    `save_file` renames a temporary file readable only by its owner. The mode is corrected here.
    """
    from safetensors.torch import save_file

    os.close(open_in_place(path, os.O_WRONLY | os.O_CREAT))
    mode = stat.S_IMODE(path.stat().st_mode)
    host_tensors = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    save_file(host_tensors, path, metadata=dict(metadata))
    path.chmod(mode)


class MappedTensor(NamedTuple):
    """A tensor in a mapped file; only what is read uses memory."""

    dtype: str
    """Dtype in the header."""
    shape: list[int]
    content: memoryview
    """[bytes] uint8."""

    def read_array(self) -> np.ndarray:
        """Return the numbers without a copy; bf16 becomes fp32."""
        import numpy as np

        values = np.frombuffer(self.content, DTYPES[self.dtype])
        if self.dtype == "BF16":  # the upper half of an fp32 number
            values = (values.astype(np.uint32) << 16).view(np.float32)
        return values.reshape(self.shape)

    def equals(self, other: MappedTensor) -> bool:
        """Return whether two tensors have the same numbers."""
        if self.dtype != other.dtype:
            import numpy as np

            return np.array_equal(self.read_array(), other.read_array())
        starts = range(0, self.content.nbytes, BLOCK_BYTES)
        blocks = (slice(start, start + BLOCK_BYTES) for start in starts)
        return self.content.nbytes == other.content.nbytes and all(
            bytes(self.content[block]) == bytes(other.content[block]) for block in blocks
        )


def map_tensors(path: Path) -> dict[str, MappedTensor]:
    """Map a file's tensors; raises ValueError or KeyError for another file."""
    with path.open("rb") as file:
        content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    start = HEADER_LENGTH_BYTES + int.from_bytes(content[:HEADER_LENGTH_BYTES], "little")
    header = json.loads(bytes(content[HEADER_LENGTH_BYTES:start]))
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = (start + offset for offset in entry["data_offsets"])
            tensors[name] = MappedTensor(entry["dtype"], entry["shape"], content[begin:end])
    return tensors


def map_arrays(path: Path) -> dict[str, np.ndarray]:
    """Map all tensors as arrays, without torch; processes share the memory. bf16 becomes fp32."""
    return {name: tensor.read_array() for name, tensor in map_tensors(path).items()}
