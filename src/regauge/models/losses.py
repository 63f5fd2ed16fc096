"""The losses of tokens: logits exist for a chunk at a time, and gradients are taken with them.

The gradient of a weighted sum of losses by the logits is (softmax - one at the label) x weight, so
it is known as soon as the logits are. Those of the head's weights and of the hidden states follow
at once, before the next chunk; the backward pass only multiplies them. Nothing is computed twice,
and nothing as large as the vocabulary is kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy

if TYPE_CHECKING:
    from collections.abc import Iterator

Batch = dict[str, Tensor]
Head = nn.Module
CHUNK_TOKENS = 1024


class LogitGradients(nn.Module):
    """Turns logits into their gradients; a module, so that it can be compiled as blocks are."""

    def forward(self, logits: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of each token [tokens] and the gradient of their weighted sum by logits.

        Logits are [tokens, vocabulary], labels and weights [tokens]; losses are in fp32.
        """
        told = torch.log_softmax(logits.float(), -1)
        places = labels[:, None]
        nll = -told.gather(1, places)[:, 0]
        slope = told.exp_().mul_(weights[:, None]).to(logits.dtype)
        slope.scatter_(1, places, (torch.expm1(-nll) * weights).to(logits.dtype)[:, None])
        return nll, slope


def weighted(head: Head, slopes: LogitGradients, hidden: Tensor, batch: Batch) -> Batch:
    """Return `loss`, the sum of the losses at `labels` times `weights`, for training.

    Hidden states are [..., width]; labels and weights have the shape before that.
    """
    labels, weights = batch["labels"].flatten().long(), batch["weights"].flatten()
    trained = [value for value in head.parameters() if value.requires_grad]
    aim = _Aim(head, slopes, labels, weights)
    loss: Tensor = _Weighted.apply(aim, hidden.flatten(0, -2), *trained)  # type: ignore[no-untyped-call]
    return {"loss": loss}


def judged(head: Head, hidden: Tensor, labels: Tensor) -> Batch:
    """Return what `token_losses` does, in the shape of the labels; nothing is for training."""
    parts = [
        token_losses(head(states), wanted)
        for states, wanted in _chunks(hidden.flatten(0, -2), labels.flatten())
    ]
    return {
        name: torch.cat([part[name] for part in parts]).view(labels.shape).clone()
        for name in parts[0]
    }


def token_losses(logits: Tensor, labels: Tensor) -> Batch:
    """Return `nll`, the negative log likelihood of each label, `predicted`, and `correct`.

    Logits end in vocabulary. The results are no views: FSDP2 hangs its hooks on a module's outputs.
    """
    scores = logits.float()
    nll = cross_entropy(scores.flatten(0, -2), labels.flatten().long(), reduction="none")
    predicted = scores.detach().argmax(-1)
    hits = (predicted == labels).to(torch.float32)
    return {"nll": nll.view(labels.shape).clone(), "correct": hits, "predicted": predicted}


class _Aim(NamedTuple):
    """What hidden states [tokens, width] are for."""

    head: Head
    slopes: LogitGradients
    labels: Tensor
    weights: Tensor
    """Both [tokens]."""


class _Weighted(torch.autograd.Function):
    """The weighted sum, with the gradients of its inputs by its side."""

    @staticmethod
    def forward(context: Any, aim: _Aim, hidden: Tensor, *trained: Tensor) -> Tensor:
        total = hidden.new_zeros((), dtype=torch.float32)
        states: list[Tensor] = []
        sums: list[Tensor] = []
        for chunk, wanted, shares in _chunks(hidden, aim.labels, aim.weights):
            with torch.enable_grad():
                leaf = chunk.detach().requires_grad_()
                logits = aim.head(leaf)
            nll, slope = aim.slopes(logits.detach(), wanted, shares)
            total += (nll * shares).sum()
            state, *own = torch.autograd.grad(logits, (leaf, *trained), slope)
            del logits, slope
            states.append(state)
            sums = [have.add_(more) for have, more in zip(sums, own, strict=True)] if sums else own
        context.save_for_backward(torch.cat(states))
        context.sums = sums  # they are as large as the weights, whatever the rows
        return total

    @staticmethod
    @once_differentiable
    def backward(context: Any, *scale: Tensor) -> tuple[Tensor | None, ...]:
        (states,) = context.saved_tensors
        (by,) = scale
        return None, states * by, *(each * by for each in context.sums)


def _chunks(*values: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the same tokens of each, so many at a time."""
    return zip(*(value.split(CHUNK_TOKENS) for value in values), strict=True)
