"""A backend that fails for marked texts, and that may take time without using a processor.

`servers.py` installs it as a choice of another package. The words of the small tokenizer are
`w5` to `w299`, and the id of a word is its number.
"""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any

import torch

from regauge.inference.backends.eager import EagerBackend

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from regauge.inference.backends import ExecutionContext, Payload, Runner

RAISES, EXITS, NOT_FINITE, HANGS = 296, 297, 298, 299
"""Ids of the words that make a batch raise, end its process, return NaN, or stop its process."""
BATCH_VARIABLE, TOKEN_VARIABLE = "CHAOS_BATCH_MS", "CHAOS_TOKEN_MS"
"""Environment variables: milliseconds of a batch and of each of its tokens, padding included."""


class ChaosRunner:
    """A runner around another one."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._batch_ms = float(os.environ.get(BATCH_VARIABLE, "0"))
        self._token_ms = float(os.environ.get(TOKEN_VARIABLE, "0"))

    def __call__(self, tokens: np.ndarray, *inputs: np.ndarray) -> Tensor:
        milliseconds = self._batch_ms + self._token_ms * tokens.size
        if milliseconds:
            time.sleep(milliseconds / 1e3)
        if (tokens == RAISES).any():
            raise ValueError("this text is poison")
        if (tokens == EXITS).any():
            os.kill(os.getpid(), signal.SIGKILL)
        if (tokens == HANGS).any():
            os.kill(os.getpid(), signal.SIGSTOP)
        output: Tensor = self._runner(tokens, *inputs)
        output[torch.from_numpy((tokens == NOT_FINITE).any(1))] = float("nan")
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


class ChaosBackend(EagerBackend):
    """Eager PyTorch with failures."""

    def load(self, payload: Payload, context: ExecutionContext) -> Runner:
        """Load a payload."""
        runner: Any = ChaosRunner(super().load(payload, context))
        return runner
