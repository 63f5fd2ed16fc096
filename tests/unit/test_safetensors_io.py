"""Tensor files equal the output of torch and have the permissions of new files."""

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

from regauge.system import safetensors_io
from regauge.training.checkpoint import tensors

VALUES = {
    "whole": torch.arange(12.0).reshape(3, 4),
    "across": torch.arange(12.0).reshape(3, 4).t(),
    "half": torch.ones(5, dtype=torch.bfloat16),
    "words": torch.arange(7),
    "none": torch.zeros(0, 3),
}


def test_mapped_arrays_equal_the_tensors_that_torch_loads(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    types = (torch.float64, torch.float16, torch.int8, torch.int16, torch.uint8, torch.bool)
    values = VALUES | {str(dtype): torch.tensor([0, 1, 3]).to(dtype) for dtype in types}
    values["signs"] = torch.tensor([-1.5, 3.140625, -0.0, float("inf")], dtype=torch.bfloat16)
    values["scalar"] = torch.tensor(2.5)
    safetensors_io.write_tensors(path, values)
    arrays = safetensors_io.map_arrays(path)
    loaded = load_file(path)
    assert arrays.keys() == loaded.keys()
    for name, tensor in loaded.items():
        expected = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
        mapped = torch.from_numpy(arrays[name])
        assert mapped.dtype == expected.dtype
        assert torch.equal(mapped, expected)


def header_and_rest(path: Path) -> tuple[Any, bytes]:
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_a_file_has_the_permissions_of_any_new_file(tmp_path: Path, mask: int, mode: int) -> None:
    path = tmp_path / "model.safetensors"
    before = os.umask(mask)
    try:
        safetensors_io.write_tensors(path, VALUES)
        safetensors_io.write_tensors(path, VALUES)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == mode
    loaded = load_file(path)
    assert loaded.keys() == VALUES.keys()
    for name, value in VALUES.items():
        assert torch.equal(loaded[name], value), name
    assert [item.name for item in tmp_path.iterdir()] == [path.name]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # the writer of torch 2.9 uses it
def test_a_checkpoint_equals_the_output_of_torch(tmp_path: Path) -> None:
    torch_folder, regauge_folder = tmp_path / "torch", tmp_path / "regauge"
    for folder in (torch_folder, regauge_folder):
        folder.mkdir()
    writer = dcp.HuggingFaceStorageWriter(str(torch_folder), save_distributed=True)
    contiguous = {name: value.contiguous() for name, value in VALUES.items()}
    dcp.save(dict(contiguous), storage_writer=writer, no_dist=True)
    tensors.save_tensors(regauge_folder, VALUES, None)
    (theirs,), (ours,) = torch_folder.iterdir(), regauge_folder.iterdir()
    assert theirs.name == ours.name
    assert header_and_rest(theirs) == header_and_rest(ours)
    loaded = {name: torch.empty_like(value) for name, value in VALUES.items()}
    tensors.load_tensors(regauge_folder, loaded)
    for name, value in VALUES.items():
        assert torch.equal(loaded[name], value), name
