"""Loss scaling: keeps fp16 gradients inside of what fp16 can hold; 1 in every other precision.

The scale is halved when a gradient overflows, and that step changes nothing; it is doubled after
many steps without one (Micikevicius et al., 2018).
"""

from __future__ import annotations

import torch

from regauge.errors import NoProgressError

FIRST_SCALE = 2.0**16
LEAST_SCALE = 2.0**-16
GROWTH_STEPS = 2000


class LossScale:
    """The factor of the loss, and the steps since it last changed."""

    def __init__(self, *, scaled: bool) -> None:
        self._scaled = scaled
        self.value = FIRST_SCALE if scaled else 1.0
        self._steps = 0
        self._sent: tuple[float, torch.Tensor] | None = None

    def tensor(self, device: torch.device) -> torch.Tensor:
        """Return the factor as a scalar on the device, sent when it has changed."""
        if self._sent is None or self._sent[0] != self.value:
            self._sent = (self.value, torch.tensor(self.value).to(device))
        return self._sent[1]

    def accepts(self, norm: torch.Tensor) -> bool:
        """Return whether a step with this gradient norm counts, and adapt to it.

        Reads the norm from the device only where the loss is scaled. The norm is that of all
        processes, so that all of them decide alike.
        """
        if not self._scaled:
            return True
        finite = bool(torch.isfinite(norm))
        self._steps = self._steps + 1 if finite else 0
        if not finite:
            self.value /= 2
            if self.value < LEAST_SCALE:
                raise NoProgressError(
                    "the gradients are not finite, however small the loss is scaled",
                    "lower optimizer.learning_rate, or go on from an earlier checkpoint",
                )
        elif self._steps == GROWTH_STEPS:
            self.value, self._steps = self.value * 2, 0
        return finite

    def state(self) -> dict[str, float]:
        """Return what a checkpoint keeps."""
        return {"value": self.value, "steps": self._steps}

    def restore(self, state: dict[str, float]) -> None:
        """Go on from a checkpoint; a run in another precision starts with its own scale."""
        if self._scaled and state["value"] != 1.0:
            self.value, self._steps = state["value"], int(state["steps"])
