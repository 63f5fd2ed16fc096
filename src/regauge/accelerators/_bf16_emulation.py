"""Matrix products in bf16 for CPUs without bf16 instructions.

On such a CPU torch multiplies bf16 values one by one, fifty times slower than fp32. These kernels
convert the values to fp32, which is exact, multiply and add in fp32, and round the result once, as
bf16 instructions do.
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
    """Replace torch's kernels in this process for as long as the returned library exists."""
    import torch

    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
        for name in OPERATIONS:
            kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
            emulated = _emulate_bf16(kernel.call_boxed, num_wide_outputs=int(name == ATTENTION))
            library.impl(name, emulated, "CPU", with_keyset=True, allow_override=True)
    return library


def _emulate_bf16(kernel: Callable[..., Any], *, num_wide_outputs: int) -> Callable[..., Any]:
    """Return a kernel that converts bf16 inputs to fp32, and its outputs back to bf16.

    The last `num_wide_outputs` outputs stay fp32: the second output of attention is the logarithm
    of its sums, which is always fp32.
    """
    import torch
    from torch import Tensor

    def is_bf16(value: Any) -> bool:
        return isinstance(value, Tensor) and value.dtype == torch.bfloat16

    def widen(value: Any) -> Any:
        return value.float() if is_bf16(value) else value

    def compute(keys: Any, *arguments: Any, **keywords: Any) -> Any:
        if not any(map(is_bf16, arguments)):
            return kernel(keys, *arguments, **keywords)
        out: Tensor | None = keywords.pop("out", None)
        arguments = tuple(widen(value) for value in arguments)
        keywords = {name: widen(value) for name, value in keywords.items()}
        if out is not None:
            return out.copy_(kernel(keys, *arguments, **keywords, out=out.float()))
        outputs = kernel(keys, *arguments, **keywords)
        if isinstance(outputs, Tensor):
            return outputs.bfloat16()
        num_narrow = len(outputs) - num_wide_outputs
        narrow = (output.bfloat16() for output in outputs[:num_narrow])
        return (*narrow, *outputs[num_narrow:])

    return compute
