"""Token losses in chunks; gradients are computed together with the logits.

The gradient of the weighted loss with respect to the logits is (softmax - one-hot label) x weight,
which needs only the logits. The gradients for the head weights and the hidden states follow in the
same chunk, and the backward pass only scales them. So nothing is computed twice, and no [tokens,
vocabulary] tensor is kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterator

Batch = dict[str, Tensor]
CHUNK_TOKENS = 1024
"""Tokens whose logits are in memory at a time."""


class LogitGradients(nn.Module):
    """Computes token losses and their logit gradients; a module, so that it can be compiled."""

    def forward(
        self,
        logits: Tensor,  # [tokens, vocabulary]
        labels: Tensor,  # [tokens]
        weights: Tensor,  # [tokens]
    ) -> tuple[Tensor, Tensor]:
        """Return the losses, [tokens] fp32, and the gradient of their weighted sum by logits."""
        log_probabilities = torch.log_softmax(logits.float(), -1)
        indices = labels[:, None]
        nll = -log_probabilities.gather(1, indices)[:, 0]
        gradient = log_probabilities.exp_().mul_(weights[:, None]).to(logits.dtype)
        gradient.scatter_(1, indices, (torch.expm1(-nll) * weights).to(logits.dtype)[:, None])
        return nll, gradient


def training_loss(
    head: nn.Module,
    logit_gradients: LogitGradients,
    hidden: Tensor,  # [..., width]
    batch: Batch,
) -> Batch:
    """Return `loss`, the sum of token losses weighted by `weights`, with its gradients.

    The batch's `labels` and `weights` have the shape of the hidden states without the width.
    """
    labels, weights = batch["labels"].flatten().long(), batch["weights"].flatten()
    trained = [value for value in head.parameters() if value.requires_grad]
    inputs = _LossInputs(head, logit_gradients, labels, weights)
    loss: Tensor = _WeightedLoss.apply(inputs, hidden.flatten(0, -2), *trained)  # type: ignore[no-untyped-call]
    return {"loss": loss}


def token_metrics(head: nn.Module, hidden: Tensor, labels: Tensor) -> Batch:
    """Return `token_losses` in the shape of the labels, computed in chunks for evaluation."""
    outputs = [
        token_losses(head(chunk), chunk_labels)
        for chunk, chunk_labels in _chunks(hidden.flatten(0, -2), labels.flatten())
    ]
    return {
        name: torch.cat([output[name] for output in outputs]).view(labels.shape).clone()
        for name in outputs[0]
    }


def recompute_losses(head: nn.Module, hidden: Tensor, labels: Tensor) -> Tensor:
    """Return the labels' negative log likelihoods, in their shape, with gradients.

    Each token has its own gradient. So a chunk's logits are computed again in the backward pass,
    and none are kept.
    """

    def compute_chunk(chunk: Tensor, chunk_labels: Tensor) -> Tensor:
        return token_losses(head(chunk), chunk_labels)["nll"]

    losses = [
        checkpoint(compute_chunk, *chunks, use_reentrant=False, preserve_rng_state=False)
        for chunks in _chunks(hidden.flatten(0, -2), labels.flatten())
    ]
    return torch.cat(losses).view(labels.shape)


def token_losses(logits: Tensor, labels: Tensor) -> Batch:
    """Return `nll` (the label's negative log likelihood), `predicted` and `correct`.

    Logits are [..., vocabulary], all else has the shape of the labels. The results are not views,
    because FSDP2 registers hooks on module outputs.
    """
    scores = logits.float()
    nll = cross_entropy(scores.flatten(0, -2), labels.flatten().long(), reduction="none")
    predicted = scores.detach().argmax(-1)
    correct = (predicted == labels).to(torch.float32)
    return {"nll": nll.view(labels.shape).clone(), "correct": correct, "predicted": predicted}


class _LossInputs(NamedTuple):
    head: nn.Module
    logit_gradients: LogitGradients
    labels: Tensor
    """[tokens]"""
    weights: Tensor
    """[tokens]"""


class _WeightedLoss(torch.autograd.Function):
    """Weighted sum of token losses; the forward pass also computes the gradients."""

    @staticmethod
    def forward(context: Any, inputs: _LossInputs, hidden: Tensor, *trained: Tensor) -> Tensor:
        total = hidden.new_zeros((), dtype=torch.float32)
        hidden_gradients: list[Tensor] = []
        sums: list[Tensor] = []
        for chunk, labels, weights in _chunks(hidden, inputs.labels, inputs.weights):
            with torch.enable_grad():
                leaf = chunk.detach().requires_grad_()
                logits = inputs.head(leaf)
            nll, logit_gradient = inputs.logit_gradients(logits.detach(), labels, weights)
            total += (nll * weights).sum()
            hidden_gradient, *gradients = torch.autograd.grad(
                logits, (leaf, *trained), logit_gradient
            )
            del logits, logit_gradient
            hidden_gradients.append(hidden_gradient)
            if sums:
                gradients = [old.add_(new) for old, new in zip(sums, gradients, strict=True)]
            sums = gradients
        context.save_for_backward(torch.cat(hidden_gradients))
        context.sums = sums  # as large as the head's weights, whatever the number of tokens
        return total

    @staticmethod
    @once_differentiable
    def backward(context: Any, *output_gradients: Tensor) -> tuple[Tensor | None, ...]:
        (hidden_gradients,) = context.saved_tensors
        (scale,) = output_gradients
        return None, hidden_gradients * scale, *(gradient * scale for gradient in context.sums)


def _chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(tensor.split(CHUNK_TOKENS) for tensor in tensors), strict=True)
