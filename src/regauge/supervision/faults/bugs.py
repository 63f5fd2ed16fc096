"""Deliberate training bugs, which a comparison of two runs must detect.

A fault plan names them (`--chaos`), each with a first step and a number of steps:

| kind | effect |
| --- | --- |
| `learning-rate` | makes every update one percent larger; the log shows the planned rate |
| `bf16-gradients` | rounds gradients to bf16 before they are summed (not under fsdp and hsdp) |
| `dropout-seed` | takes the dropout masks (kind `counter`) from other rows |
| `attention-mask` | hides the last token of every text |
| `row-shift` | starts a batch one row later in the row order; its point is `order` |
| `gelu` | lets one block compute the other GELU: tanh instead of exact, or the reverse |
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from regauge.models import architectures
from regauge.system.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from regauge.accelerators import Batch
    from regauge.supervision.faults.faults import Fault

LEARNING_RATE_FACTOR = 1.01


class LearningRateSchedule(Protocol):
    def next(self) -> Any:
        """Return the next step's learning rate."""


@contextmanager
def inject_bugs(
    module: nn.Module, schedule: LearningRateSchedule, batches: list[Batch], faults: Sequence[Fault]
) -> Iterator[None]:
    """Apply a step's bugs within the block; batches are changed in place."""
    kinds = {fault.kind for fault in faults}
    with ExitStack() as stack:
        for batch in batches:
            if "dropout-seed" in kinds:
                batch["keys"] = batch["keys"] + 1
            if "attention-mask" in kinds:
                batch["segments"] = _hide_last_token(batch["segments"])
        if "bf16-gradients" in kinds:
            stack.enter_context(_round_gradients(module))
        for fault in faults:
            if fault.kind == "gelu":
                stack.enter_context(_swap_gelu(module, fault.layer))
        if "learning-rate" in kinds:
            stack.enter_context(_scale_learning_rate(schedule))
        yield


@contextmanager
def _scale_learning_rate(schedule: LearningRateSchedule) -> Iterator[None]:
    original = schedule.next
    schedule.next = lambda: original() * LEARNING_RATE_FACTOR  # type: ignore[method-assign]
    try:
        yield
    finally:
        del schedule.next


def _hide_last_token(segments: Tensor) -> Tensor:
    """Return segments [batch, length] without each text's last token."""
    following = torch.zeros_like(segments)
    following[:, :-1] = segments[:, 1:]
    return segments * (segments == following)


@contextmanager
def _round_gradients(module: nn.Module) -> Iterator[None]:
    def round_to_bf16(gradient: Tensor) -> Tensor:
        return gradient.to(torch.bfloat16).to(gradient.dtype)

    trained = [weight for weight in module.parameters() if weight.requires_grad]
    handles = [weight.register_hook(round_to_bf16) for weight in trained]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _swap_gelu(module: nn.Module, layer: int) -> Iterator[None]:
    """Replace one block's activation; raises SettingsError if the block does not have a GELU."""
    blocks = architectures.find_blocks(module)
    location = _find_gelu(blocks[layer]) if layer < len(blocks) else None
    if location is None:
        raise SettingsError(f"block {layer} does not contain a GELU", "name another fault.layer")
    parent, name, replacement = location
    original = getattr(parent, name)
    setattr(parent, name, replacement)
    try:
        yield
    finally:
        setattr(parent, name, original)


def _find_gelu(block: nn.Module) -> tuple[nn.Module, str, nn.Module] | None:
    """Return the parent and name of a block's GELU, and the GELU with the other formula."""
    probe = torch.linspace(-3, 3, 64)
    variants: tuple[Callable[[], nn.Module], ...] = (nn.GELU, lambda: nn.GELU(approximate="tanh"))
    for parent in block.modules():
        for name, child in parent.named_children():
            if next(child.parameters(), None) is not None or list(child.children()):
                continue
            if "gelu" not in type(child).__name__.lower():
                continue
            values = child(probe)

            def distance(variant: nn.Module, values: Tensor = values) -> float:
                return float((variant(probe) - values).abs().max())

            return parent, name, max((make() for make in variants), key=distance)
    return None
