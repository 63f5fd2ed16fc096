"""Where two runs part, in a sentence and a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from regauge.training.localise import Spot

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


def sentence(step: int, spots: Sequence[Spot], first: Spot | None) -> str:
    """Return which value parts first, or that rounding explains all of them."""
    if first is None:
        worst = max(spots, key=lambda spot: spot.apart / spot.bound if spot.bound else 0.0)
        return (
            f"Step {step} computed again from one state: rounding explains every difference, "
            f"nearest to its bound is {_what(worst)}, {_apart(worst)}."
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
    return f"At step {step} they part in {WHERE[first.stage]}: {told}: {HINTS[first.stage]}."


def table(spots: Sequence[Spot], first: Spot | None) -> tuple[dict[str, str], ...]:
    """Return the values around the first one, or those nearest to their bounds, as rows."""
    if first is not None:
        place = list(spots).index(first)
        shown = list(spots)[max(0, place - AROUND) : place + AROUND + 1]
    else:
        nearest = sorted(spots, key=lambda spot: -(spot.apart / spot.bound if spot.bound else 0.0))
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


def _what(spot: Spot) -> str:
    types = " and ".join(dict.fromkeys(spot.dtypes))
    return f"{spot.name} ({', '.join(filter(None, (spot.kind, types)))})"


def _apart(spot: Spot) -> str:
    bound = f"rounding explains {spot.bound:.2g}" if spot.bound else "equal programs are equal"
    return f"{spot.apart:.2g} apart where {bound}"
