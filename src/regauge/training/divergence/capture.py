"""Captures one step's values, module by module, to compare two computations.

    capture-00000012.0.safetensors   samples of every value on process 0
    capture-00000012.0.json          names and shapes, in computation order

Activations belong to process 0's first microbatch, which has the same rows on any number of
processes. Weight gradients and updates belong to the global batch. At most `MAX_SAMPLES` evenly
spaced elements are stored per value.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from regauge.models import architectures
from regauge.system import safetensors_io
from regauge.system.files import write_json

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import nn

    from regauge.accelerators import Batch
    from regauge.training.context import RunContext
    from regauge.training.state import TrainState

MAX_SAMPLES = 1 << 16
Stage = Literal["input", "forward", "backward", "gradient", "update"]
"""Inputs, module outputs, output gradients, weight gradients and weight updates."""


@dataclass(frozen=True)
class CapturedValue:
    """Describes one captured value."""

    stage: Stage
    name: str
    module_class: str
    """Empty for other values."""
    dtype: str
    shape: tuple[int, ...]
    key: str


class StepCapture:
    """Records one step's values on one process.

    `noise` is the largest random relative change to each leaf module's output and its gradient. It
    simulates rounding.
    """

    def __init__(self, context: RunContext, state: TrainState, noise: float = 0.0) -> None:
        self._context, self._state = context, state
        self._noise = noise
        self._values: list[CapturedValue] = []
        self._samples: dict[str, Tensor] = {}
        self._before: dict[str, Tensor] = {}
        self._captured: set[tuple[Stage, str]] = set()
        self._generator = torch.Generator().manual_seed(state.step)

    @contextmanager
    def record(self, batches: list[Batch]) -> Iterator[None]:
        context, state = self._context, self._state
        with ExitStack() as stack:
            if context.world.is_main_process:
                for name, value in batches[0].items():
                    self._add("input", name, "", value)
                for name, module in _select_modules(context, state):
                    hook = module.register_forward_hook(self._build_forward_hook(name))
                    stack.callback(hook.remove)
            optimizer = state.optimizer
            stack.callback(optimizer.register_step_pre_hook(self._before_update).remove)
            stack.callback(optimizer.register_step_post_hook(self._after_update).remove)
            yield

    def write(self, folder: Path, step: int) -> None:
        """Write the recorded values; each process writes separate files."""
        name = f"capture-{step:08d}.{self._context.world.rank}"
        safetensors_io.write_tensors(folder / f"{name}.safetensors", self._samples)
        document = {
            "step": step,
            "execution": self._describe_execution(),
            "values": [asdict(value) for value in self._values],
        }
        write_json(folder / f"{name}.json", document)

    def _build_forward_hook(self, name: str) -> Any:
        def hook(module: nn.Module, _inputs: Any, output: Any) -> Any:
            value = _find_tensor(output)
            if value is None:
                return None
            if self._noise and not list(module.children()):
                value.data.mul_(self._draw_noise(value))
                if value.requires_grad:
                    value.register_hook(lambda gradient: gradient * self._draw_noise(gradient))
            kind = type(module).__name__
            self._add("forward", name, kind, value)
            if value.requires_grad:
                value.register_hook(lambda gradient: self._add("backward", name, kind, gradient))
            return None

        return torch.compiler.disable(hook)

    def _before_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        del optimizer
        for name, master in self._state.model.masters().items():
            self._before[name] = sample_elements(master)
            if master.grad is not None:
                self._add("gradient", name, "", master.grad)

    def _after_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        del optimizer
        for name, master in self._state.model.masters().items():
            self._add("update", name, "", master, minus=self._before[name])

    def _add(
        self, stage: Stage, name: str, kind: str, value: Tensor, minus: Tensor | None = None
    ) -> None:
        """Record a value once per name; recomputations and later microbatches are ignored."""
        if (stage, name) in self._captured:
            return
        self._captured.add((stage, name))
        samples = sample_elements(value)
        key = f"{len(self._values):05d}"
        self._samples[key] = samples if minus is None else samples - minus
        dtype = str(value.dtype).removeprefix("torch.")
        self._values.append(CapturedValue(stage, name, kind, dtype, tuple(value.shape), key))

    def _draw_noise(self, like: Tensor) -> Tensor:
        """Return random factors in [1 - noise, 1 + noise]."""
        uniform = torch.rand(like.shape, generator=self._generator, dtype=torch.float32)
        return (1 + self._noise * (2 * uniform - 1)).to(like)

    def _describe_execution(self) -> dict[str, Any]:
        settings = self._context.settings
        return {
            "accelerator": self._context.accelerator.kind,
            "device": self._context.mfu.chip.name,
            "precision": settings.execution.precision,
            "attention": settings.model.attention,
            "compile": settings.execution.compile,
            "strategy": settings.strategy.kind if settings.strategy else None,
            "processes": self._context.world.size,
            "threads": settings.execution.threads,
            "microbatch_rows": self._context.task_at(self._state.step).batch.microbatch_rows,
            "torch": torch.__version__,
        }


def sample_elements(value: Tensor) -> Tensor:
    """Copy at most `MAX_SAMPLES` evenly spaced elements to the CPU."""
    flat = value.detach()
    flat = (flat.full_tensor() if isinstance(flat, DTensor) else flat).reshape(-1)
    stride = -(-flat.numel() // MAX_SAMPLES) or 1
    return flat[::stride].to("cpu", copy=True).contiguous()


def _select_modules(context: RunContext, state: TrainState) -> list[tuple[str, nn.Module]]:
    """Return the named modules to capture, except those inside compiled blocks."""
    root = state.model.module
    is_compiled = context.settings.execution.compile == "blocks"
    blocks = architectures.find_blocks(root) if is_compiled else []
    inner = {id(module) for block in blocks for module in block.modules() if module is not block}
    return [
        (name or "(all)", module)
        for name, module in root.named_modules()
        if id(module) not in inner
    ]


def _find_tensor(output: Any) -> Tensor | None:
    """Return the first floating-point tensor in a module's output, or None."""
    if isinstance(output, Tensor):
        return output if output.is_floating_point() else None
    if not isinstance(output, dict | tuple | list):
        return None
    items = output.values() if isinstance(output, dict) else output
    return next((tensor for tensor in map(_find_tensor, items) if tensor is not None), None)
