"""The modules that are trained: a transformers model with what a task needs of it.

Each takes one batch (a dictionary of tensors with static shapes) and returns one. Everything that
touches weights happens inside of `forward`, so that a strategy can shard them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils.checkpoint import checkpoint

from regauge.errors import SettingsError
from regauge.models.reading import longest, reading

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from regauge.models.dropout import DropoutKeys

Batch = dict[str, Tensor]
CHUNK_TOKENS = 1024


class TextModule(nn.Module):
    """A transformers model that reads batches of token rows.

    A batch holds `tokens`, `segments` and `positions`, all [batch, length] int, and `keys`,
    [batch] int32. Segment 0 is padding; tokens see their own segment alone.
    """

    def __init__(self, model: PreTrainedModel, keys: DropoutKeys) -> None:
        super().__init__()
        self.model = model
        self.dropout_keys = keys
        self.compute_dtype = torch.float32
        self.reading = reading(model)

    @property
    def longest(self) -> int | None:
        """The most tokens that a text can have, or None where nothing limits them."""
        return longest(self.model, self.reading)

    def hidden(self, batch: Batch, *, packed: bool) -> Tensor:
        """Return the last hidden states, [batch, length, width]."""
        self.dropout_keys.rows = batch["keys"] if self.training else None
        habits, places = self.reading, batch["positions"]
        inner: Any = self.model.base_model
        output = inner(
            input_ids=batch["tokens"],
            attention_mask=habits.masks(batch["segments"], self.compute_dtype, packed=packed),
            position_ids=places + habits.first_position if habits.first_position else places,
            **({"use_cache": False} if habits.causal else {}),
        )
        states: Tensor = output.last_hidden_state
        return states


class MaskedLanguageModel(TextModule):
    """Predicts masked tokens; the head sees the masked positions alone."""

    def __init__(self, model: PreTrainedModel, keys: DropoutKeys) -> None:
        super().__init__(model, keys)
        _masked_head(model)

    def forward(self, batch: Batch) -> Batch:
        """Return `nll` and `correct`, [batch, masked], at the positions `masked` of a batch."""
        hidden = self.hidden(batch, packed=True)
        index = batch["masked"][..., None].expand(-1, -1, hidden.shape[-1])
        logits = _masked_head(self.model)(hidden.gather(1, index))
        return token_losses(logits, batch["labels"])


class CausalLanguageModel(TextModule):
    """Predicts each next token of a packed row; logits exist for one chunk at a time."""

    def __init__(self, model: PreTrainedModel, keys: DropoutKeys) -> None:
        super().__init__(model, keys)
        if not self.reading.causal:
            raise SettingsError(
                f"architecture '{model.config.model_type}' sees the tokens that it should predict",
                "choose a causal one, such as llama or gpt2",
            )

    def forward(self, batch: Batch) -> Batch:
        """Return `nll` and `correct`, [batch, length]."""
        hidden = self.hidden(batch, packed=True)
        rows, length, width = hidden.shape
        chunks = hidden.reshape(-1, width).split(CHUNK_TOKENS)
        labels = batch["labels"].reshape(-1).split(CHUNK_TOKENS)
        parts = [self._chunk(chunk, wanted) for chunk, wanted in zip(chunks, labels, strict=True)]
        return {
            name: torch.cat([part[name] for part in parts]).view(rows, length).clone()
            for name in parts[0]
        }

    def _chunk(self, hidden: Tensor, labels: Tensor) -> Batch:
        result: Batch = checkpoint(
            self._losses, hidden, labels, use_reentrant=False, preserve_rng_state=False
        )
        return result

    def _losses(self, hidden: Tensor, labels: Tensor) -> Batch:
        head: Any = self.model.get_output_embeddings()
        return token_losses(head(hidden), labels)


class Encoder(TextModule):
    """Turns a text into one vector of length 1: the mean of its tokens' last hidden states."""

    def forward(self, batch: Batch) -> Batch:
        """Return `vectors`, [batch, width] fp32."""
        hidden = self.hidden(batch, packed=False)
        return {"vectors": normalize(mean_pool(hidden, batch["segments"]), dim=-1)}


def mean_pool(hidden: Tensor, segments: Tensor) -> Tensor:
    """Return the mean over real tokens, [batch, width] fp32."""
    real = (segments > 0).to(torch.float32)[..., None]
    return (hidden.float() * real).sum(1) / real.sum(1).clamp(min=1.0)


def token_losses(logits: Tensor, labels: Tensor) -> Batch:
    """Return the negative log likelihood and the hit of each label; logits end in vocabulary.

    The results are no views: FSDP2 hangs its hooks on a module's outputs.
    """
    scores = logits.float()
    nll = cross_entropy(scores.flatten(0, -2), labels.flatten().long(), reduction="none")
    hits = scores.detach().argmax(-1) == labels
    return {"nll": nll.view(labels.shape).clone(), "correct": hits.to(torch.float32)}


def _masked_head(model: PreTrainedModel) -> Any:
    """Return the part of a masked language model that turns hidden states into logits."""
    for name in ("cls", "lm_head"):
        if hasattr(model, name):
            return getattr(model, name)
    head, decoder = getattr(model, "head", None), getattr(model, "decoder", None)
    if isinstance(head, nn.Module) and isinstance(decoder, nn.Module):
        return nn.Sequential(head, decoder)
    raise SettingsError(
        f"task 'mlm' does not know the head of {type(model).__name__}",
        "use bert, roberta or modernbert",
    )
