"""Mistakes of a training stack, made on purpose: what a comparison of two runs must find.

A fault plan names them (`--chaos`), each with its first step and how many it lasts:

learning-rate    every update is one percent larger, and the log does not say so
bf16-gradients   gradients are rounded to bf16 before they are summed (not under fsdp and hsdp)
dropout-seed     the masks of dropout (of kind `counter`) are those of other rows
attention-mask   the last token of every text is not seen
row-shift        a batch begins one row later in the order; its moment is `order`
gelu             one block computes the other GELU: by tanh instead of exact, or the reverse
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from regauge.errors import SettingsError
from regauge.models import architectures as models

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from regauge.accelerators import Batch
    from regauge.faults import Fault
    from regauge.training.session import Session

ONE_PERCENT = 1.01


@contextmanager
def mistaken(session: Session, batches: list[Batch], faults: list[Fault]) -> Iterator[None]:
    """Make a step's mistakes within the block; batches are changed in place."""
    kinds = {fault.kind for fault in faults}
    with ExitStack() as stack:
        for batch in batches:
            if "dropout-seed" in kinds:
                batch["keys"] = batch["keys"] + 1
            if "attention-mask" in kinds:
                batch["segments"] = _without_last(batch["segments"])
        if "bf16-gradients" in kinds:
            stack.enter_context(_rounding(session.prepared.module))
        for fault in faults:
            if fault.kind == "gelu":
                stack.enter_context(_other_gelu(session.prepared.module, fault.layer))
        if "learning-rate" in kinds:
            stack.callback(setattr, session.rates, "factor", 1.0)
            session.rates.factor = ONE_PERCENT
        yield


def _without_last(segments: Tensor) -> Tensor:
    """Return segments [batch, length] without the last token of each of them."""
    following = torch.zeros_like(segments)
    following[:, :-1] = segments[:, 1:]
    return segments * (segments == following)


@contextmanager
def _rounding(module: nn.Module) -> Iterator[None]:
    def rounded(gradient: Tensor) -> Tensor:
        return gradient.to(torch.bfloat16).to(gradient.dtype)

    hooks = [each.register_hook(rounded) for each in module.parameters() if each.requires_grad]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _other_gelu(module: nn.Module, layer: int) -> Iterator[None]:
    """Exchange the activation of one block; raises SettingsError where it has no GELU."""
    blocks = models.blocks(module)
    found = _gelu(blocks[layer]) if layer < len(blocks) else None
    if found is None:
        raise SettingsError(f"block {layer} has no GELU", "name another fault.layer")
    parent, name, other = found
    own = getattr(parent, name)
    setattr(parent, name, other)
    try:
        yield
    finally:
        setattr(parent, name, own)


def _gelu(block: nn.Module) -> tuple[nn.Module, str, nn.Module] | None:
    """Return where a block keeps its GELU, and the one that computes it in the other way."""
    probe = torch.linspace(-3, 3, 64)
    ways: tuple[Callable[[], nn.Module], ...] = (nn.GELU, lambda: nn.GELU(approximate="tanh"))
    for parent in block.modules():
        for name, child in parent.named_children():
            if next(child.parameters(), None) is not None or list(child.children()):
                continue
            if "gelu" not in type(child).__name__.lower():
                continue
            values = child(probe)
            return parent, name, max(
                (way() for way in ways), key=lambda way: float((way(probe) - values).abs().max())
            )  # fmt: skip
    return None
