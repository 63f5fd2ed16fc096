"""Texts that the model goes on with: its greedy answers to held-out prompts.

They are computed by the module that trains, in batches of the shape of an evaluation, so that
nothing new is compiled and weights stay where a strategy has them. A row is computed anew for each
of its tokens: simple, exact, and as dear as an evaluation of one microbatch per token.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from regauge.data.batches import positions
from regauge.data.tokenizer import Encoder
from regauge.models.multitask import set_active_task

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import nn

    from regauge.training.heldout import HeldoutSet
    from regauge.training.settings import Samples

FILE = "samples.jsonl"


@dataclass
class Exchange:
    """A prompt, what follows it in its row, and what the model says instead."""

    prompt: np.ndarray
    reference: np.ndarray
    answer: list[int] = field(default_factory=list)
    ended: bool = False
    """Whether the model ended its answer by itself."""


def generate_samples(
    heldout: HeldoutSet, module: nn.Module, wanted: Samples, dataset: Path
) -> list[dict[str, Any]]:
    """Return the answers of a module as texts; every process calls this and has the same."""
    if not wanted.prompts:
        return []
    found = list(_exchanges(heldout, wanted))
    encoder = Encoder(dataset / "tokenizer")
    size, _ = heldout.feed.largest
    set_active_task(module, heldout.of)
    module.eval()
    with torch.no_grad():
        for at in range(0, len(found), size):
            _answer(heldout, module, found[at : at + size], wanted, encoder.facts.special)
    return [
        {
            "prompt": encoder.decode(each.prompt.tolist()),
            "answer": encoder.decode(each.answer),
            "ended": each.ended,
            "reference": encoder.decode(each.reference[: wanted.most_tokens].tolist()),
        }
        for each in found
    ]


def _exchanges(heldout: HeldoutSet, wanted: Samples) -> Iterator[Exchange]:
    """Yield the prompts of the first rows that have one, in the keyed order of the split."""
    count = 0
    for number in heldout.numbers.tolist():
        if count == wanted.prompts:
            return
        found = heldout.task.exchange(heldout.feed.row(number), wanted.prompt_tokens)
        if found is not None:
            count += 1
            yield Exchange(*found)


def _answer(
    heldout: HeldoutSet,
    module: nn.Module,
    exchanges: list[Exchange],
    wanted: Samples,
    special: tuple[int, ...],
) -> None:
    """Let a module answer prompts, of which no more than a microbatch has rows are given."""
    size, length = heldout.feed.largest
    arrays = heldout.feed.empty(size, length)
    for row, each in enumerate(exchanges):
        arrays["tokens"][row, : len(each.prompt)] = each.prompt
    waiting = dict(enumerate(exchanges))
    while waiting:
        for row, each in waiting.items():
            arrays["segments"][row, : len(each.prompt) + len(each.answer)] = 1
        arrays["positions"][:] = positions(arrays["segments"])
        predicted = _predicted(heldout, module, arrays)
        for row, each in list(waiting.items()):
            place = len(each.prompt) + len(each.answer)
            token = int(predicted[row, place - 1])
            each.ended = token in special
            if not each.ended:
                each.answer.append(token)
            full = len(each.answer) == wanted.most_tokens or place + 1 >= length
            if each.ended or full:
                del waiting[row]
            else:
                arrays["tokens"][row, place] = token


def _predicted(heldout: HeldoutSet, module: nn.Module, arrays: dict[str, np.ndarray]) -> np.ndarray:
    """Return the likeliest next token after every one, [rows, length], as process 0 has it.

    Processes must agree on when they are done; on devices of different kinds they might not.
    """
    host = {name: torch.from_numpy(value.copy()) for name, value in arrays.items()}
    with closing(heldout.accelerator.wrap_loader(iter([[host]]), heldout.device)) as placed:
        (batch,) = next(placed)
    predicted = module(batch)["predicted"]
    heldout.mark()
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast(predicted, src=0)
    return np.asarray(predicted.cpu().numpy())
