"""What fills the memory of a process, for the record of one that ran out of it."""

from __future__ import annotations

import gc
import sys
from collections import defaultdict
from typing import Any

MOST = 5


def largest(most: int = MOST) -> list[dict[str, Any]]:
    """Return the tensors that take most bytes, those of one type and shape together.

    `[{"tensors": "float32 [30522, 768]", "count": 3, "bytes": 281290752}]`; no torch is imported,
    and where it was not, there are none. What autograd keeps for the backward pass and Python does
    not see is not counted.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    storages: dict[int, tuple[int, str, int]] = {}
    for one in gc.get_objects():
        if not issubclass(type(one), torch.Tensor):
            continue
        try:
            storage, values = one.untyped_storage(), one.numel()
            if storage.device.type == "meta":  # shapes alone: a fake tensor warns when asked where
                continue
            where, size = storage.data_ptr(), storage.nbytes()
        except (RuntimeError, NotImplementedError):  # a sharded tensor has none
            continue
        name = f"{str(one.dtype).removeprefix('torch.')} {list(one.shape)}"
        if where:  # of those that share one, the largest gives its name
            storages[where] = max(storages.get(where, (0, "", 0)), (values, name, size))
    found: dict[str, list[int]] = defaultdict(list)
    for _, name, size in storages.values():
        found[name].append(size)
    ordered = sorted(found.items(), key=lambda each: -sum(each[1]))[:most]
    return [{"tensors": name, "count": len(sizes), "bytes": sum(sizes)} for name, sizes in ordered]
