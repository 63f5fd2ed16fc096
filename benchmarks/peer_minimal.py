"""A run of this project as an engineer writes it by hand for one device: a loop and nothing else.

bf16 weights over fp32 masters, the encoder compiled as a whole, one stream of text cut into rows,
the head on the masked positions alone, fused AdamW and clipping. No checkpoint, no log, no order
that could be resumed: what the same device can do without any of that.

    python benchmarks/peer_minimal.py FOLDER RUN_FILE [--turn N]
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from peer_parts import Order, in_turns, measuring, optimized, ordered, reading
from peer_trainer import cut, plain
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

IGNORED = -100
HIDDEN, RANDOM = 0.8, 0.1
"""Shares of the predicted tokens that are masked, or shown as another one."""


def main() -> None:
    """Train until nobody wants another turn."""
    order = ordered(__doc__)
    reader = reading(order)
    reader.model = plain(reader.model)
    measured = measuring(order, reader)
    in_turns(order, _steps(order, reader.model), measured)


def _steps(order: Order, model: Any) -> Iterator[int]:
    """Train, and yield how many tokens each step had."""
    settings, masked = order.settings, order.settings.task.kind == "mlm"
    model.train().to(order.device, order.dtype)
    body, head = torch.compile(model.base_model), _head(model)
    weights = list(model.parameters())
    masters = [value.detach().float() for value in weights]
    optimizer, decay = optimized(order, masters)
    batches, pieces = _batches(order), settings.batch.rows // order.rows
    while True:
        count = 0
        for tokens in islice(batches, pieces):
            shown, places, wanted = _masked(order, tokens) if masked else _shifted(tokens)
            states = body(input_ids=shown).last_hidden_state
            some = (
                states
                if places is None
                else states.gather(1, places[..., None].expand(-1, -1, states.shape[-1]))
            )
            logits = head(some).flatten(0, 1).float()
            loss = cross_entropy(logits, wanted.flatten(), ignore_index=IGNORED)
            (loss / pieces).backward()
            count += tokens.numel()
        for master, value in zip(masters, weights, strict=True):
            master.grad = None if value.grad is None else value.grad.float()
            value.grad = None
        clip_grad_norm_(masters, settings.optimizer.max_grad_norm)
        optimizer.step()
        decay.step()
        with torch.no_grad():
            torch._foreach_copy_(weights, masters)
        yield count


def _head(model: Any) -> Any:
    """Return what turns hidden states into logits: the masked head, or the last layer."""
    return model.cls if hasattr(model, "cls") else model.get_output_embeddings()


def _batches(order: Order) -> Iterator[Tensor]:
    """Yield the tokens that are computed at a time, [rows, length], shuffled anew in each epoch."""
    length = order.settings.task.bucket_lengths(order.dataset.manifest)[-1]
    rows = torch.from_numpy(np.stack(cut(order.dataset, length, whole=False))).long()
    draw = torch.Generator().manual_seed(order.settings.seed)
    while True:
        for some in torch.randperm(len(rows), generator=draw).split(order.rows):
            if len(some) == order.rows:
                yield rows[some].to(order.device, non_blocking=True)


def _masked(order: Order, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tokens that are shown, the places that are predicted, and what is there."""
    facts, share = order.dataset.manifest.tokenizer, order.settings.task.mlm_probability
    count = max(1, round(share * tokens.shape[1]))
    places = torch.rand(tokens.shape, device=order.device).topk(count, dim=1).indices
    wanted = tokens.gather(1, places)
    fate = torch.rand(wanted.shape, device=order.device)
    other = torch.randint_like(wanted, facts.vocabulary)
    hidden = torch.full_like(wanted, facts.mask)
    kept = torch.where(fate < HIDDEN + RANDOM, other, wanted)
    seen = torch.where(fate < HIDDEN, hidden, kept)
    return tokens.scatter(1, places, seen), places, wanted


def _shifted(tokens: Tensor) -> tuple[Tensor, None, Tensor]:
    """Return each token with the next one to be predicted; the last of a row has none."""
    wanted = torch.full_like(tokens, IGNORED)
    wanted[:, :-1] = tokens[:, 1:]
    return tokens, None, wanted


if __name__ == "__main__":
    main()
