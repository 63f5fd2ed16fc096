"""Where two computations of one step part: the first value that differs by more than rounding does.

Each value of both is measured against a reference, and its bound is measured, too: the reference is
computed once more with every smallest module's result, and the slope there, changed at random by as
much as a rounding to the coarser type of the two changes it. That tells how far rounding alone
grows up to each value.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file

from regauge.training.divergence.capture import Stage, Value

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

ROOM = 8.0
"""How much more than one measurement of rounding a value may differ: that one is a single draw,
and weights and slopes are rounded as well."""
ROUNDING = {"bf16": 2.0**-9, "fp16": 2.0**-12, "tf32": 2.0**-12, "fp32": 2.0**-24}
"""Largest relative change by rounding to a type: half of its machine epsilon."""
FLAT = 1e-12
"""A value whose norm is smaller has no direction to compare."""
SHIFTS = range(-2, 3)
STAGES: tuple[Stage, ...] = ("rows", "forward", "backward", "gradient", "update")


@dataclass(frozen=True)
class Captured:
    """One step of one computation, over the files of all its processes."""

    chosen: dict[str, Any]
    values: dict[tuple[Stage, str], Value]
    samples: dict[tuple[Stage, str], Tensor]


@dataclass(frozen=True)
class Four:
    """One step, computed in every way."""

    ours: Captured
    theirs: Captured
    reference: Captured
    rounded: Captured
    """The reference with rounding."""

    @property
    def all(self) -> tuple[Captured, ...]:
        """Each of them."""
        return self.ours, self.theirs, self.reference, self.rounded


@dataclass(frozen=True)
class Spot:
    """One value of both computations."""

    step: int
    """Steps that were done before it."""
    stage: Stage
    name: str
    kind: str
    """Class of the module."""
    dtypes: tuple[str, str]
    apart: float
    """Relative difference between the two, of the reference's norm."""
    bound: float
    """What rounding explains of it."""
    off: tuple[float, float]
    """How far each is from the reference."""
    remark: str = ""
    """What the difference looks like."""

    @property
    def beyond(self) -> bool:
        """Whether rounding does not explain it."""
        return self.apart > self.bound


@dataclass(frozen=True)
class Localised:
    """What was found of two runs that part."""

    step: int
    """Steps done before the one in which they part."""
    spots: tuple[Spot, ...] = ()
    """Every value of that step in the order of the computation."""
    first: Spot | None = None
    """The first that differs by more than rounding does; None where none does."""
    chosen: tuple[tuple[str, str, str], ...] = ()
    """What decides which kernels compute, where it differs: its name, here and there."""
    again: bool = True
    """Whether they part when they are computed again, from their run files and with this code."""


def read(folder: Path, step: int) -> Captured:
    """Read what the processes of a computation wrote of a step."""
    chosen: dict[str, Any] = {}
    values: dict[tuple[Stage, str], Value] = {}
    samples: dict[tuple[Stage, str], Tensor] = {}
    for path in sorted(folder.glob(f"capture-{step:08d}.*.json")):
        document = json.loads(path.read_text())
        tensors = load_file(path.with_suffix(".safetensors"))
        chosen = chosen or document["chosen"]
        for each in document["values"]:
            value = Value(**{**each, "shape": tuple(each["shape"])})
            if values.setdefault((value.stage, value.name), value) is value:
                samples[value.stage, value.name] = tensors[value.key]
    return Captured(chosen, values, samples)


def spots(step: int, four: Four, *, alike: bool) -> list[Spot]:
    """Return every value that all of them have, in the order of the computation.

    Where two were computed alike, no rounding makes them differ.
    """
    shared = [key for key in four.ours.values if all(key in each.values for each in four.all)]
    found = [_spot(step, key, four) for stage in STAGES for key in shared if key[0] == stage]
    if alike:
        return [replace(spot, bound=0.0) for spot in found]
    gradients = {spot.name: spot.bound for spot in found if spot.stage == "gradient"}
    moved = four.reference.samples
    return [
        _widened(spot, gradients.get(spot.name, 0.0), moved["update", spot.name])
        if spot.stage == "update"
        else spot
        for spot in found
    ]


def first(found: list[Spot]) -> Spot | None:
    """Return the first value that differs by more than rounding does."""
    return next((spot for spot in found if spot.beyond), None)


def chosen(four: Four) -> tuple[tuple[str, str, str], ...]:
    """Return what was chosen differently of what decides which kernels compute."""
    ours, theirs = four.ours.chosen, four.theirs.chosen
    return tuple(
        (name, str(ours[name]), str(theirs.get(name)))
        for name in ours
        if ours[name] != theirs.get(name)
    )


def _spot(step: int, key: tuple[Stage, str], four: Four) -> Spot:
    ours, theirs, reference, rounded = (each.samples[key] for each in four.all)
    value, other = four.ours.values[key], four.theirs.values[key]
    same = value.shape == other.shape
    apart, bound, off, remark = math.inf, 0.0, (0.0, 0.0), f"{value.shape} and {other.shape}"
    if same and value.stage == "rows":
        apart = float((ours != theirs).double().mean())
        whole = apart and ours.numel() == math.prod(value.shape)
        remark = _shift(ours.view(value.shape), theirs.view(value.shape)) if whole else ""
    elif same:
        size = max(float(reference.double().norm()), FLAT)
        apart = _distance(ours, theirs) / size
        bound = ROOM * _distance(rounded, reference) / size
        off = (_distance(ours, reference) / size, _distance(theirs, reference) / size)
        remark = _ratio(ours, theirs) if value.stage == "update" else ""
    dtypes = (value.dtype, other.dtype)
    return Spot(step, value.stage, value.name, value.kind, dtypes, apart, bound, off, remark)


def _widened(update: Spot, gradient_bound: float, moved: Tensor) -> Spot:
    """Return an update with room for signs that turn.

    Adam's first updates have one size and the gradient's sign. Where a gradient is off by a share d
    of its norm, about d of its n elements are smaller than that and may change theirs; each differs
    by twice its size then, which is 2 sqrt(d) of the norm. Elements are whole: room for one more of
    the largest is room for the rest of it.
    """
    size, largest = float(moved.double().norm()), float(moved.double().abs().max())
    room = 2 * math.sqrt(gradient_bound + (largest / max(size, FLAT)) ** 2)
    return replace(update, bound=max(update.bound, room))


def _distance(one: Tensor, other: Tensor) -> float:
    if one.shape != other.shape:
        return math.inf
    found = float((one.double() - other.double()).norm())
    return found if math.isfinite(found) else math.inf


def _ratio(ours: Tensor, theirs: Tensor) -> str:
    """Return by how much one is a multiple of the other, where it is one to three digits."""
    one, other = ours.double(), theirs.double()
    factor = float(one @ other / max(float(one @ one), FLAT))
    alike = float((other - factor * one).norm()) <= 1e-3 * float(other.norm())
    return f"{factor:.4g} times as large" if alike else ""


def _shift(ours: Tensor, theirs: Tensor) -> str:
    """Return by how many places rows [rows, …] were moved, where that explains most of them."""
    for places in SHIFTS:
        if not places or abs(places) >= len(ours):
            continue
        here = ours[max(0, places) : len(ours) + min(0, places)]
        there = theirs[max(0, -places) : len(theirs) - max(0, places)]
        if torch.equal(here, there):
            return f"moved by {places}"
    return ""
