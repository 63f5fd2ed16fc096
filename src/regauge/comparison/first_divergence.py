"""Where two runs part, in a sentence and a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from regauge.training.divergence.localize import Localised, Spot

AROUND = 3
"""Values that are shown before and after the first one."""
WHERE = {
    "rows": "what they read",
    "forward": "what a module returns",
    "backward": "the slope at what a module returned",
    "gradient": "a weight's gradient, summed over the global batch",
    "update": "a weight's update",
}
"""The stages of a step, in words."""
HINTS = {
    "rows": "look at the order, the masks and the seeds",
    "forward": "look at this module's kernel",
    "backward": "look at the backward of this module, or of what follows it",
    "gradient": "the slopes agree: look at how gradients are summed, and in which type",
    "update": "the gradients agree: look at the optimizer and its learning rate",
}


def sentence(found: Localised) -> str:
    """Return which value parts first, or that rounding explains all of them."""
    step, first = found.step, found.first
    if not found.again:
        return (
            f"Computed again from one state, they do not part up to step {step + 1}: what made "
            "the runs differ is not in their run files, such as the code or the machine; give the "
            "command there, on copies of the runs."
        )
    if first is None:
        worst = max(found.spots, key=_near)
        return (
            f"Step {step} computed again from one state: rounding explains every difference, "
            f"nearest to its bound is {_what(worst)}, {_apart(worst)}{_chosen(found)}."
        )
    remark = f", {first.remark}" if first.remark else ""
    if first.stage == "rows":
        told = f"{first.name} differs in {100 * first.apart:.3g}% of its elements{remark}"
    else:
        ours, theirs = first.off
        told = (
            f"{_what(first)}, {_apart(first)}{remark}; from the reference the first run is "
            f"{ours:.2g} off and the other {theirs:.2g}"
        )
    hint = HINTS[first.stage] + _chosen(found)
    return f"At step {step} they part in {WHERE[first.stage]}: {told}: {hint}."


def table(found: Localised) -> tuple[dict[str, str], ...]:
    """Return the values around the first one, or those nearest to their bounds, as rows."""
    shown: Sequence[Spot]
    if found.first is not None:
        place = found.spots.index(found.first)
        shown = found.spots[max(0, place - AROUND) : place + AROUND + 1]
    else:
        nearest = sorted(found.spots, key=_near, reverse=True)
        shown = nearest[: 2 * AROUND]
    return tuple(
        {
            "name": spot.name,
            "stage": spot.stage,
            "kind": spot.kind,
            "types": " ".join(dict.fromkeys(spot.dtypes)),
            "apart": f"{spot.apart:.2g}",
            "rounding": f"{spot.bound:.2g}",
            "first_off": f"{spot.off[0]:.2g}",
            "other_off": f"{spot.off[1]:.2g}",
            "beyond": "yes" if spot.beyond else "",
        }
        for spot in shown
    )


def _near(spot: Spot) -> float:
    """Return how near a value comes to its bound, 1 at it."""
    return spot.apart / spot.bound if spot.bound else 0.0


def _chosen(found: Localised) -> str:
    """Return what was chosen differently, behind a sentence."""
    told = ", ".join(f"{name} ({ours}, {theirs})" for name, ours, theirs in found.chosen)
    return f"; chosen differently: {told}" if told else ""


def _what(spot: Spot) -> str:
    types = " and ".join(dict.fromkeys(spot.dtypes))
    return f"{spot.name} ({', '.join(filter(None, (spot.kind, types)))})"


def _apart(spot: Spot) -> str:
    bound = f"rounding explains {spot.bound:.2g}" if spot.bound else "equal programs are equal"
    return f"{spot.apart:.2g} apart where {bound}"
