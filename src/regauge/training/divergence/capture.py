"""What one step computes, module by module, written down so that two computations can be compared.

    capture-00000012.0.safetensors   samples of every value that process 0 has seen
    capture-00000012.0.json          what they are, in the order in which they were computed

The first microbatch of process 0 is looked at: it holds the same rows on any number of processes.
Gradients and updates of the weights are those of the whole global batch. Of each value at most
`SAMPLES` elements are kept, spread evenly over it.
"""

from __future__ import annotations

import json
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from regauge import safetensors_io
from regauge.models import architectures as models

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import nn

    from regauge.accelerators import Batch
    from regauge.training.context import RunContext
    from regauge.training.state import TrainState

SAMPLES = 1 << 16
Stage = Literal["rows", "forward", "backward", "gradient", "update"]
"""What a batch holds, what modules return, the slopes of that, and what becomes of the weights."""


@dataclass(frozen=True)
class Value:
    """One value that was written down."""

    stage: Stage
    name: str
    """Of the module, the weight, or the part of the batch."""
    kind: str
    """Class of the module."""
    dtype: str
    shape: tuple[int, ...]
    key: str
    """Of its samples in the file."""


class Capture:
    """Collects the values of one step in one process."""

    def __init__(self, context: RunContext, state: TrainState, noise: float = 0.0) -> None:
        self._context, self._state = context, state
        self._noise = noise
        self._values: list[Value] = []
        self._samples: dict[str, Tensor] = {}
        self._before: dict[str, Tensor] = {}
        self._seen: set[tuple[Stage, str]] = set()
        self._draw = torch.Generator().manual_seed(state.step)

    @contextmanager
    def watching(self, batches: list[Batch]) -> Iterator[None]:
        """Collect what is computed within the block: one step."""
        context, state = self._context, self._state
        with ExitStack() as stack:
            if context.world.first:
                for name, value in batches[0].items():
                    self._add("rows", name, "", value)
                for name, module in _watched(context, state):
                    hook = module.register_forward_hook(self._looked(name))
                    stack.callback(hook.remove)
            optimizer = state.optimizer
            stack.callback(optimizer.register_step_pre_hook(self._before_update).remove)
            stack.callback(optimizer.register_step_post_hook(self._after_update).remove)
            yield

    def write(self, folder: Path, step: int) -> None:
        """Write what was collected; each process writes its own files."""
        name = f"capture-{step:08d}.{self._context.world.rank}"
        safetensors_io.write(folder / f"{name}.safetensors", self._samples)
        document = {
            "step": step,
            "chosen": self._chosen(),
            "values": [asdict(value) for value in self._values],
        }
        (folder / f"{name}.json").write_text(json.dumps(document))

    def _looked(self, name: str) -> Any:
        def look(module: nn.Module, _inputs: Any, output: Any) -> Any:
            found = _tensor(output)
            if found is None:
                return None
            if self._noise and not list(module.children()):
                found.data.mul_(self._rounding(found))
                if found.requires_grad:
                    found.register_hook(lambda slope: slope * self._rounding(slope))
            kind = type(module).__name__
            self._add("forward", name, kind, found)
            if found.requires_grad:
                found.register_hook(lambda slope: self._add("backward", name, kind, slope))
            return None

        return torch.compiler.disable(look)

    def _before_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        del optimizer
        for name, master in self._state.model.masters().items():
            self._before[name] = sampled(master)
            if master.grad is not None:
                self._add("gradient", name, "", master.grad)

    def _after_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        del optimizer
        for name, master in self._state.model.masters().items():
            self._add("update", name, "", master, minus=self._before[name])

    def _add(
        self, stage: Stage, name: str, kind: str, value: Tensor, minus: Tensor | None = None
    ) -> None:
        """Write a value down, once for each name: what is computed again is known already."""
        if (stage, name) in self._seen:
            return
        self._seen.add((stage, name))
        samples = sampled(value)
        key = f"{len(self._values):05d}"
        self._samples[key] = samples if minus is None else samples - minus
        dtype = str(value.dtype).removeprefix("torch.")
        self._values.append(Value(stage, name, kind, dtype, tuple(value.shape), key))

    def _rounding(self, like: Tensor) -> Tensor:
        """Return factors that change a value, at random, as much as rounding may."""
        drawn = torch.rand(like.shape, generator=self._draw, dtype=torch.float32)
        return (1 + self._noise * (2 * drawn - 1)).to(like)

    def _chosen(self) -> dict[str, Any]:
        """Return what decides which kernels compute, as far as settings and torch say."""
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


def sampled(value: Tensor) -> Tensor:
    """Return at most SAMPLES elements of a tensor, spread evenly, on the CPU; a copy."""
    whole = value.detach()
    whole = (whole.full_tensor() if isinstance(whole, DTensor) else whole).reshape(-1)
    stride = -(-whole.numel() // SAMPLES) or 1
    return whole[::stride].to("cpu", copy=True).contiguous()


def _watched(context: RunContext, state: TrainState) -> list[tuple[str, nn.Module]]:
    """Return the modules to look at by name; of a compiled block, the block as a whole."""
    module = state.model.module
    compiled = models.blocks(module) if context.settings.execution.compile == "blocks" else []
    inside = {id(part) for block in compiled for part in block.modules() if part is not block}
    return [
        (name or "(all)", part) for name, part in module.named_modules() if id(part) not in inside
    ]


def _tensor(output: Any) -> Tensor | None:
    """Return the first tensor of floating point in what a module returned."""
    if isinstance(output, Tensor):
        return output if output.is_floating_point() else None
    parts = output.values() if isinstance(output, dict) else output
    if not isinstance(output, dict | tuple | list):
        return None
    return next(filter(lambda found: found is not None, map(_tensor, parts)), None)
