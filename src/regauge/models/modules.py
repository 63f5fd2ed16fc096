"""The modules that are trained: a transformers model with what a task needs of it.

Each takes one batch (a dictionary of tensors with static shapes) and returns one. Everything that
touches weights happens inside of `forward`, so that a strategy can shard them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from regauge.errors import SettingsError
from regauge.models import sentence_transformers
from regauge.models.attention_masks import longest, reading
from regauge.models.losses import Batch, LogitGradients, judged, token_losses, weighted
from regauge.models.pooling import Pool

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from regauge.models.dropout import DropoutKeys


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
        self.slopes = LogitGradients()
        self._typed = getattr(model.config, "type_vocab_size", 0) > 1

    @property
    def longest(self) -> int | None:
        """The most tokens that a text can have, or None where nothing limits them."""
        return longest(self.model, self.reading)

    def hidden(self, batch: Batch, *, packed: bool, model: PreTrainedModel | None = None) -> Tensor:
        """Return the last hidden states, [batch, length, width], also of another model like it."""
        inner: Any = (model or self.model).base_model
        states: Tensor = inner(**self.inputs(batch, packed=packed)).last_hidden_state
        return states

    def losses(self, head: nn.Module, hidden: Tensor, batch: Batch) -> Batch:
        """Return what `weighted` does for training, and what `judged` does else."""
        if self.training and torch.is_grad_enabled():
            return weighted(head, self.slopes, hidden, batch)
        return judged(head, hidden, batch["labels"])

    def inputs(self, batch: Batch, *, packed: bool) -> dict[str, Any]:
        """Return a batch as the arguments of transformers' `forward`, and key its dropout.

        Types of tokens are left out where the architecture knows none, or one alone.
        """
        self.dropout_keys.rows = batch["keys"] if self.training else None
        habits, places = self.reading, batch["positions"]
        return {
            "input_ids": batch["tokens"],
            "attention_mask": habits.masks(batch["segments"], self.compute_dtype, packed=packed),
            "position_ids": places + habits.first_position if habits.first_position else places,
            **({"use_cache": False} if habits.causal else {}),
            **({"token_type_ids": batch["types"]} if self._typed and "types" in batch else {}),
        }


class MaskedLanguageModel(TextModule):
    """Predicts masked tokens; the head sees the masked positions alone."""

    def __init__(self, model: PreTrainedModel, keys: DropoutKeys) -> None:
        super().__init__(model, keys)
        _masked_head(model)

    def forward(self, batch: Batch) -> Batch:
        """Return what `losses` does at the positions `masked`, [batch, masked]."""
        hidden = _at(self.hidden(batch, packed=True), batch["masked"])
        return self.losses(_masked_head(self.model), hidden, batch)


class PairedLanguageModel(TextModule):
    """Predicts masked tokens, and whether the second half of a row follows the first."""

    def __init__(self, model: PreTrainedModel, keys: DropoutKeys) -> None:
        super().__init__(model, keys)
        if not hasattr(getattr(model, "cls", None), "seq_relationship"):
            raise SettingsError(
                f"architecture '{model.config.model_type}' has no head for the next sentence",
                "use bert, or leave task.next_sentence out",
            )

    def forward(self, batch: Batch) -> Batch:
        """Return what `losses` does, and of the pairs `pair_nll` and `pair_correct`."""
        inner: Any = self.model.base_model
        states = inner(**self.inputs(batch, packed=True))
        heads: Any = self.model.cls
        hidden = _at(states.last_hidden_state, batch["masked"])
        pairs = token_losses(heads.seq_relationship(states.pooler_output), batch["apart"])
        tokens = self.losses(heads.predictions, hidden, batch)
        return {**tokens, "pair_nll": pairs["nll"], "pair_correct": pairs["correct"]}


class CausalLanguageModel(TextModule):
    """Predicts each next token of a packed row."""

    def __init__(self, model: PreTrainedModel, keys: DropoutKeys) -> None:
        super().__init__(model, keys)
        if not self.reading.causal:
            raise SettingsError(
                f"architecture '{model.config.model_type}' sees the tokens that it should predict",
                "choose a causal one, such as llama or gpt2",
            )

    def forward(self, batch: Batch) -> Batch:
        """Return what `losses` does, [batch, length]."""
        head: Any = self.model.get_output_embeddings()
        return self.losses(head, self.hidden(batch, packed=True), batch)


class Encoder(TextModule):
    """Turns a text into one vector: by default the mean of its last hidden states, of length 1."""

    def __init__(
        self,
        model: PreTrainedModel,
        keys: DropoutKeys,
        pooling: sentence_transformers.Pooling = sentence_transformers.Pooling(),  # noqa: B008 - it is frozen
    ) -> None:
        super().__init__(model, keys)
        self.pooling = pooling
        self.pool = Pool(pooling)

    def forward(self, batch: Batch) -> Batch:
        """Return `vectors`, [batch, width] fp32."""
        hidden = self.hidden(batch, packed=False)
        return {"vectors": self.pool(hidden, batch["segments"])}


class Classifier(TextModule):
    """Scores the classes of a text, or one value, by the architecture's own head.

    That of a causal architecture sees the last token alone.
    """

    def __init__(self, model: PreTrainedModel, keys: DropoutKeys) -> None:
        super().__init__(model, keys)
        if self.reading.causal and not hasattr(model, "score"):
            kind = model.config.model_type
            raise SettingsError(f"the head of '{kind}' is not known here", "choose another")

    def forward(self, batch: Batch) -> Batch:
        """Return `scores`, [batch, classes] fp32."""
        if self.reading.causal:
            head: Any = self.model.score
            logits = head(_at(self.hidden(batch, packed=False), self._last(batch)))[:, 0]
        else:
            logits = self.model(**self.inputs(batch, packed=False)).logits
        return {"scores": logits.float().clone()}

    def _last(self, batch: Batch) -> Tensor:
        """Return the place of each text's last token, [batch, 1]; one for padding is none.

        transformers looks for it, whatever padding consists of, and so finds it here.
        """
        real, pad = batch["segments"] > 0, self.model.config.pad_token_id
        if pad is not None:
            real &= batch["tokens"] != pad
        return (real * batch["positions"]).amax(1, keepdim=True).long()


def _at(hidden: Tensor, places: Tensor) -> Tensor:
    """Return the hidden states at some places of each row, [batch, places, width]."""
    return hidden.gather(1, places[..., None].expand(-1, -1, hidden.shape[-1]))


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
