"""Files of tensors: what torch's own writer leaves, and readable as any new file is."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from regauge import safetensors_io
from regauge.checkpoint import tensors

VALUES = {
    "whole": torch.arange(12.0).reshape(3, 4),
    "across": torch.arange(12.0).reshape(3, 4).t(),
    "half": torch.ones(5, dtype=torch.bfloat16),
    "words": torch.arange(7),
    "none": torch.zeros(0, 3),
}


def header_and_rest(path: Path) -> tuple[Any, bytes]:
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_a_file_may_be_read_by_whom_any_new_file_may(tmp_path: Path, mask: int, mode: int) -> None:
    path = tmp_path / "model.safetensors"
    before = os.umask(mask)
    try:
        safetensors_io.write(path, VALUES)
        safetensors_io.write(path, VALUES)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == mode
    found = load_file(path)
    assert found.keys() == VALUES.keys()
    for name, value in VALUES.items():
        assert torch.equal(found[name], value), name
    assert [item.name for item in tmp_path.iterdir()] == [path.name]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # torch 2.9's own writer uses it
def test_a_checkpoint_has_what_torch_writes(tmp_path: Path) -> None:
    torchs, own = tmp_path / "torch", tmp_path / "own"
    for folder in (torchs, own):
        folder.mkdir()
    writer = dcp.HuggingFaceStorageWriter(str(torchs), save_distributed=True)
    contiguous = {name: value.contiguous() for name, value in VALUES.items()}
    dcp.save(dict(contiguous), storage_writer=writer, no_dist=True)
    tensors.write(own, VALUES, None)
    (theirs,), (ours,) = torchs.iterdir(), own.iterdir()
    assert theirs.name == ours.name
    assert header_and_rest(theirs) == header_and_rest(ours)
    found = {name: torch.empty_like(value) for name, value in VALUES.items()}
    tensors.read_into(own, found)
    for name, value in VALUES.items():
        assert torch.equal(found[name], value), name
