"""A custom module and loss: masked tokens are predicted from their neighbours, with focal loss."""

import torch
from torch import nn

from regauge.models.custom import CustomModule
from regauge.models.modules import token_losses
from regauge.tasks.mlm import Mlm


class Neighbours(nn.Module):
    """Predicts each masked token from the tokens within `reach` positions of it."""

    def __init__(self, vocab_size, width, reach):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.convolution = nn.Conv1d(width, width, 2 * reach + 1, padding=reach)
        self.head = nn.Linear(width, vocab_size)

    def forward(self, batch):
        embedded = self.embedding(batch["tokens"])  # [rows, length, width]
        hidden = torch.relu(self.convolution(embedded.transpose(1, 2))).transpose(1, 2)
        positions = batch["masked"][..., None].expand(-1, -1, hidden.shape[2])
        return token_losses(self.head(hidden.gather(1, positions)), batch["labels"])


class Gaps(Mlm):
    """Masked tokens, weighted by how uncertain the model is about them (focal loss)."""

    width: int = 64
    """Width of the hidden states."""
    reach: int = 2
    """Number of tokens to each side that are read."""
    focus: float = 2.0
    """Exponent of the uncertainty, 1 - p; 0 is cross-entropy. Held-out losses are cross-entropy."""

    def build_module(self, model, manifest, seed):
        return CustomModule(Neighbours(manifest.tokenizer.vocab_size, self.width, self.reach))

    def loss(self, output, batch):
        uncertainty = 1 - output["nll"].neg().exp()
        losses = output["nll"] * uncertainty**self.focus
        return (losses * batch["weights"]).sum(), batch["weights"].sum()
