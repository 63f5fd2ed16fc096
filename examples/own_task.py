"""A model and a loss of one's own: masked tokens by their neighbours, hard ones counted more."""

import torch
from torch import nn

from regauge.models.custom import Own
from regauge.models.modules import token_losses
from regauge.tasks.mlm import Mlm


class Neighbours(nn.Module):
    """Says each masked token by those within some places of it."""

    def __init__(self, vocabulary, width, reach):
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.around = nn.Conv1d(width, width, 2 * reach + 1, padding=reach)
        self.say = nn.Linear(width, vocabulary)

    def forward(self, batch):
        words = self.words(batch["tokens"])  # [rows, length, width]
        hidden = torch.relu(self.around(words.transpose(1, 2))).transpose(1, 2)
        places = batch["masked"][..., None].expand(-1, -1, hidden.shape[2])
        return token_losses(self.say(hidden.gather(1, places)), batch["labels"])


class Gaps(Mlm):
    """Masked tokens, of which those that are known already count less (focal loss)."""

    width: int = 64
    """Width of the hidden states."""
    reach: int = 2
    """How many tokens to each side are read."""
    focus: float = 2.0
    """Power of what is missing to certainty; 0 is the plain loss. Held-out losses are plain."""

    def module(self, model, manifest, seed):
        return Own(Neighbours(manifest.tokenizer.vocabulary, self.width, self.reach))

    def loss(self, output, batch):
        doubt = 1 - output["nll"].neg().exp()
        return (output["nll"] * doubt**self.focus * batch["weights"]).sum(), batch["weights"].sum()
