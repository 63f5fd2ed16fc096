"""The trained modules: a transformers model with the outputs that a task needs.

Each maps a batch (a dictionary of tensors with static shapes) to a dictionary of tensors. Weights
are used only inside `forward`, so that a strategy can shard them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from regauge.models import sentence_transformers
from regauge.models.attention_masks import (
    AttentionSpec,
    detect_attention_spec,
    max_text_tokens,
    pack_texts,
    unpack_texts,
    unpacked_outputs,
)
from regauge.models.dropout import PackedKeys, RowKeys
from regauge.models.generation.sampling import filter_logits, select_tokens
from regauge.models.losses import (
    Batch,
    LogitGradients,
    recompute_losses,
    token_losses,
    token_metrics,
    training_loss,
)
from regauge.models.pooling import TextPooling
from regauge.models.settings import GREEDY
from regauge.system.errors import SettingsError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from regauge.models.dropout import DropoutKeys


class TextModule(nn.Module):
    """A transformers model that reads batches of token rows.

    A batch holds `tokens`, `segments` and `positions`, all [batch, length] int, and the dropout
    `keys`, [batch] int32. Segment 0 is padding; tokens attend only to their segment.

    If a text batch has `packed`, [rows, row length] int64, the model computes the texts in these
    rows: entries are token numbers in the flattened batch, and -1 for padding. `places`, [batch,
    length] int64, are the numbers of the same tokens in the flattened rows.
    """

    packs_texts = True
    """Whether a row may hold several texts."""
    has_head = False
    """Whether the outputs are those of the model's own head, which also reads the mask."""

    def __init__(
        self,
        model: PreTrainedModel,
        keys: DropoutKeys,
        attention_spec: AttentionSpec | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.dropout_keys = keys
        self.compute_dtype = torch.float32
        self.attention_spec = attention_spec or detect_attention_spec(
            model, packs_texts=self.packs_texts, has_head=self.has_head
        )
        self.logit_gradients = LogitGradients()
        num_types = getattr(model.config, "type_vocab_size", None)
        self.has_token_types = num_types is not None and num_types > 1
        """Whether the model gets token types."""
        self._needs_token_types = num_types is None

    @property
    def can_pack(self) -> bool:
        """Whether text batches may have `packed`."""
        return not self.packs_texts and self.attention_spec.unpacks_texts

    @property
    def max_tokens(self) -> int | None:
        """Maximum text length in tokens; None if unlimited."""
        return max_text_tokens(self.model, self.attention_spec)

    def hidden_states(
        self, batch: Batch, *, packed: bool, model: PreTrainedModel | None = None
    ) -> Tensor:
        """Return the last hidden states, [batch, length, width].

        `model` replaces the module's model by another one of the same architecture.
        """
        base_model: Any = (model or self.model).base_model
        states: Tensor = base_model(**self.model_inputs(batch, packed=packed)).last_hidden_state
        return unpack_texts(states, batch["places"]) if "packed" in batch else states

    def logits(self, batch: Batch) -> Tensor:
        """Return the model head's own outputs for a text batch."""
        inputs = self.model_inputs(batch, packed=False)
        model: Any = self.model
        with unpacked_outputs(model, batch.get("places")):
            logits: Tensor = model(**inputs).logits
        return logits

    def token_outputs(self, head: nn.Module, hidden: Tensor, batch: Batch) -> Batch:
        """Return `training_loss` if gradients are needed, else `token_metrics`."""
        if self.training and torch.is_grad_enabled():
            return training_loss(head, self.logit_gradients, hidden, batch)
        return token_metrics(head, hidden, batch["labels"])

    def model_inputs(self, batch: Batch, *, packed: bool) -> dict[str, Any]:
        """Return a batch as transformers `forward` arguments, and set the dropout keys.

        Token types are left out if the architecture has at most one. Architectures that
        number positions without padding give a literal padding token none.
        """
        spec, positions = self.attention_spec, batch["positions"]
        keys = RowKeys(batch["keys"]) if self.training else None
        if spec.first_position and not packed:
            positions = spec.skip_padding_tokens(batch["tokens"], positions)
        if "packed" in batch:
            batch, packed = pack_texts({**batch, "model_positions": positions}), True
            positions = batch["model_positions"]
            keys = keys and RowKeys(keys.rows, PackedKeys(batch["keys"], batch["positions"]))
        self.dropout_keys.current = keys
        tokens = batch["tokens"]
        masks = spec.build_inputs(batch["segments"], positions, self.compute_dtype, packed=packed)
        inputs: dict[str, Any] = {"input_ids": tokens, **masks}
        if spec.is_causal:
            inputs["use_cache"] = False
        if self.has_token_types and "types" in batch:
            inputs["token_type_ids"] = batch["types"]
        elif self.has_token_types and self._needs_token_types:  # in others the default is 0
            inputs["token_type_ids"] = torch.zeros_like(tokens)
        return inputs


class MaskedLanguageModel(TextModule):
    """Predicts masked tokens; the head is applied only at masked positions."""

    def __init__(self, model: PreTrainedModel, keys: DropoutKeys) -> None:
        super().__init__(model, keys)
        _masked_head(model)

    def forward(self, batch: Batch) -> Batch:
        """Return the `token_outputs` at the positions `masked`, [batch, K]."""
        hidden = _gather_positions(self.hidden_states(batch, packed=True), batch["masked"])
        return self.token_outputs(_masked_head(self.model), hidden, batch)


class NextSentenceModel(TextModule):
    """Predicts masked tokens, and if the second half of a row follows the first."""

    def __init__(self, model: PreTrainedModel, keys: DropoutKeys) -> None:
        super().__init__(model, keys)
        if not hasattr(getattr(model, "cls", None), "seq_relationship"):
            raise SettingsError(
                f"architecture '{model.config.model_type}' has no next-sentence head",
                "use bert, or set task.next_sentence = false",
            )

    def forward(self, batch: Batch) -> Batch:
        """Return the `token_outputs`, [batch, K], and `pair_nll` and `pair_correct`, [batch]."""
        base_model: Any = self.model.base_model
        states = base_model(**self.model_inputs(batch, packed=True))
        heads: Any = self.model.cls
        hidden = _gather_positions(states.last_hidden_state, batch["masked"])
        logits = heads.seq_relationship(states.pooler_output)
        pairs = token_losses(logits, batch["next_sentence_label"])
        tokens = self.token_outputs(heads.predictions, hidden, batch)
        return {**tokens, "pair_nll": pairs["nll"], "pair_correct": pairs["correct"]}


class CausalLanguageModel(TextModule):
    """Predicts the next token at each position in a packed row."""

    generation = GREEDY
    """How `drawn` tokens are sampled."""

    def __init__(self, model: PreTrainedModel, keys: DropoutKeys) -> None:
        super().__init__(model, keys)
        if not self.attention_spec.is_causal:
            raise SettingsError(
                f"architecture '{model.config.model_type}' is not causal",
                "choose a causal one, such as llama or gpt2",
            )

    def forward(self, batch: Batch) -> Batch:
        """Return the `token_outputs`, [batch, length].

        If the batch has `draws`, [batch] in [0, 1), they also select the tokens `drawn`, [batch],
        that follow the positions `last`, [batch, 1].
        """
        head: Any = self.model.get_output_embeddings()
        hidden = self.hidden_states(batch, packed=True)
        outputs = self.token_outputs(head, hidden, batch)
        if "draws" in batch:
            logits = head(_gather_positions(hidden, batch["last"])[:, 0]).float()
            outputs["drawn"] = select_tokens(filter_logits(logits, self.generation), batch["draws"])
        return outputs


class AnswerLikelihoodModel(CausalLanguageModel):
    """Computes the answer's log-probability in each row; `weights` mark its tokens."""

    def forward(self, batch: Batch) -> Batch:
        """Return `log_probabilities`, [batch] fp32; in evaluation also the `token_outputs`."""
        outputs: Batch = {}
        if self.training and torch.is_grad_enabled():
            head: Any = self.model.get_output_embeddings()
            hidden = self.hidden_states(batch, packed=True)
            nll = recompute_losses(head, hidden, batch["labels"])
        else:
            outputs = super().forward(batch)
            nll = outputs["nll"]
        return {**outputs, "log_probabilities": -(nll * batch["weights"]).sum(1)}


class Encoder(TextModule):
    """Encodes a text as one vector; by default the normalized mean of its last hidden states."""

    packs_texts = False

    def __init__(
        self,
        model: PreTrainedModel,
        keys: DropoutKeys,
        pooling: sentence_transformers.Pooling = sentence_transformers.Pooling(),  # noqa: B008 - it is frozen
    ) -> None:
        super().__init__(model, keys)
        self.pooling = pooling
        self.pool = TextPooling(pooling)

    def forward(self, batch: Batch) -> Batch:
        """Return `vectors`, [batch, width] fp32."""
        hidden = self.hidden_states(batch, packed=False)
        return {"vectors": self.pool(hidden, batch["segments"])}


class Classifier(TextModule):
    """Scores the classes of a text, or one value, with the architecture's classification head.

    A head with the name `score` is applied only at the last token, as in causal architectures.
    """

    packs_texts = False

    def __init__(self, model: PreTrainedModel, keys: DropoutKeys) -> None:
        self.reads_last_token = hasattr(model, "score")
        self.has_head = not self.reads_last_token
        super().__init__(model, keys)
        if self.attention_spec.is_causal and not self.reads_last_token:
            kind = model.config.model_type
            problem = f"the classification head of '{kind}' is not supported"
            raise SettingsError(problem, "choose another architecture")

    def forward(self, batch: Batch) -> Batch:
        """Return `scores`, [batch, classes] fp32."""
        if self.reads_last_token:
            head: Any = self.model.score
            hidden = self.hidden_states(batch, packed=False)
            logits = head(_gather_positions(hidden, self._last_token_positions(batch)))[:, 0]
        else:
            logits = self.logits(batch)
        return {"scores": logits.float().clone()}

    def _last_token_positions(self, batch: Batch) -> Tensor:
        """Return the position of each text's last token other than padding, [batch, 1].

        transformers also searches by the padding id.
        """
        real, pad_id = batch["segments"] > 0, self.model.config.pad_token_id
        if pad_id is not None:
            real &= batch["tokens"] != pad_id
        return (real * batch["positions"]).amax(1, keepdim=True).long()


class TokenClassifier(TextModule):
    """Scores the classes of each token, with the architecture's head."""

    packs_texts = False

    def forward(self, batch: Batch) -> Batch:
        """Return `scores`, [batch, length, classes] fp32."""
        return {"scores": self.logits(batch).float().clone()}


def _gather_positions(hidden: Tensor, positions: Tensor) -> Tensor:
    """Return the hidden states at some positions in each row, [batch, positions, width]."""
    return hidden.gather(1, positions[..., None].expand(-1, -1, hidden.shape[-1]))


def _masked_head(model: PreTrainedModel) -> Any:
    """Return the head of a masked language model, which maps hidden states to logits."""
    for name in ("cls", "lm_head"):
        if hasattr(model, name):
            return getattr(model, name)
    head, decoder = getattr(model, "head", None), getattr(model, "decoder", None)
    if isinstance(head, nn.Module) and isinstance(decoder, nn.Module):
        return nn.Sequential(head, decoder)
    raise SettingsError(
        f"task 'mlm' does not support the head of {type(model).__name__}",
        "use bert, roberta or modernbert",
    )
