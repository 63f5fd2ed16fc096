"""The Python part of the device: the module `torch.sim`, and its process group."""

from __future__ import annotations

from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from simulated_device import GROUP, NAME

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Iterator


def create_module(library: ModuleType) -> ModuleType:
    """Return the module that torch and its users call, as `torch.cuda` for its devices."""
    module = ModuleType(f"torch.{NAME}")
    functions = {
        name: function
        for name, function in globals().items()
        if getattr(function, "__module__", None) == __name__
    }
    module.__dict__.update(functions)
    module.__dict__.update(
        Stream=torch.Stream,
        Event=torch.Event,
        default_generator=library.default_generator,
        num_kernels=library.num_kernels,
        device_count=library.device_count,
        is_initialized=lambda: True,
        is_available=lambda: library.device_count() > 0,
        synchronize=torch.accelerator.synchronize,
    )
    return module


def register_group(library: ModuleType) -> None:
    """Register the collectives of the device, which a gloo group of the processor computes."""
    import torch.distributed as dist

    def create(store: Any, rank: int, size: int, timeout: dt.timedelta) -> Any:
        return library.wrap_group(dist.ProcessGroupGloo(store, rank, size, timeout))

    dist.Backend.register_backend(GROUP, create, devices=[NAME])


def current_device() -> int:
    """Return the index of the current device of this thread."""
    return torch.accelerator.current_device_index()


def set_device(index: torch.device | int) -> None:
    """Select the device of this thread."""
    torch.accelerator.set_device_index(index)


@contextmanager
def device(index: torch.device | int) -> Iterator[None]:
    """Select a device for the duration of the block."""
    previous = current_device()
    set_device(index)
    try:
        yield
    finally:
        set_device(previous)


def current_stream(index: torch.device | int | None = None) -> torch.Stream:
    """Return the current stream of a device."""
    return torch.accelerator.current_stream(index)


@contextmanager
def stream(selected: torch.Stream | None) -> Iterator[None]:
    """Select a stream for the duration of the block."""
    if selected is None:
        yield
        return
    previous = current_stream(selected.device)
    torch.accelerator.set_stream(selected)
    try:
        yield
    finally:
        torch.accelerator.set_stream(previous)


def manual_seed(seed: int) -> None:
    """Seed the generator of the current device."""
    torch.get_device_module(NAME).default_generator(current_device()).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seed the generators of all devices."""
    for index in range(torch.accelerator.device_count()):
        torch.get_device_module(NAME).default_generator(index).manual_seed(seed)


def get_rng_state(index: torch.device | int | str = NAME) -> torch.Tensor:
    """Return the state of the generator of a device, on the CPU."""
    return _generator(index).get_state()


def set_rng_state(state: torch.Tensor, index: torch.device | int | str = NAME) -> None:
    """Restore the state of the generator of a device."""
    _generator(index).set_state(state)


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Return the types of automatic mixed precision."""
    return [torch.bfloat16, torch.float16]


def is_bf16_supported() -> bool:
    """Return whether the device computes in bf16."""
    return True


def _generator(index: torch.device | int | str) -> torch.Generator:
    if not isinstance(index, int):
        number = torch.device(index).index
        index = current_device() if number is None else number
    generator: torch.Generator = torch.get_device_module(NAME).default_generator(index)
    return generator


def _is_in_bad_fork() -> bool:
    return False
