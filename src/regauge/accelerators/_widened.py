"""Products of bf16 on a processor that has no instructions for them.

torch multiplies such values one by one there, fifty times slower than fp32. Here they are widened,
which is exact, multiplied and summed in fp32, and rounded once: what the instructions themselves
do.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.library import Library

ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
OPERATIONS = (*PRODUCTS, *(f"{name}.out" for name in PRODUCTS), ATTENTION, f"{ATTENTION}_backward")


@cache
def install() -> Library:
    """Have torch widen the products of this process; return what keeps it so."""
    import torch

    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
        for name in OPERATIONS:
            kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
            widened = _widened(kernel.call_boxed, stays_wide=int(name == ATTENTION))
            library.impl(name, widened, "CPU", with_keyset=True, allow_override=True)
    return library


def _widened(kernel: Callable[..., Any], *, stays_wide: int) -> Callable[..., Any]:
    """Return a kernel that computes in fp32 what it is given in bf16.

    The last of attention's two results is the logarithm of its sums, which is never narrow.
    """
    import torch
    from torch import Tensor

    def narrow(value: Any) -> bool:
        return isinstance(value, Tensor) and value.dtype == torch.bfloat16

    def wide(value: Any) -> Any:
        return value.float() if narrow(value) else value

    def compute(keys: Any, *given: Any, **named: Any) -> Any:
        if not any(map(narrow, given)):
            return kernel(keys, *given, **named)
        into: Tensor | None = named.pop("out", None)
        values = [wide(value) for value in given]
        named = {name: wide(value) for name, value in named.items()}
        if into is not None:
            return into.copy_(kernel(keys, *values, **named, out=into.float()))
        found = kernel(keys, *values, **named)
        if isinstance(found, Tensor):
            return found.bfloat16()
        last = len(found) - stays_wide
        return (*(each.bfloat16() for each in found[:last]), *found[last:])

    return compute
