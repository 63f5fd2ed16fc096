"""Masked language modelling, optionally with next-sentence prediction."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from regauge.models.io_spec import InputSpec
from regauge.system.errors import SettingsError
from regauge.tasks import MetricSums
from regauge.tasks._tokens import NLL, TokenTask

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from regauge.data.batches import Arrays, MicrobatchPlan, RandomKey
    from regauge.data.dataset import DatasetManifest, DatasetRows
    from regauge.data.loader import CollatorConfig
    from regauge.models.architectures import HeadKind
    from regauge.models.modules import TextModule
    from regauge.models.settings import Model

HALVES = ("first", "second")
IS_RANDOM_KEY, OFFSET_KEY = -1, -2
"""Keys for a row's two random draws; token draws have the keys 0 and above."""


class Mlm(TokenTask):
    """Predict masked tokens in packed rows (Devlin et al., 2019: 80 % mask, 10 % random)."""

    peer_names: ClassVar[tuple[str, ...]] = ("masked_lm", "fill_mask", "automodelformaskedlm")

    has_special_tokens: ClassVar[bool] = True

    mlm_probability: float = Field(default=0.15, gt=0, lt=1)
    """Fraction of real tokens to predict."""
    next_sentence: bool = False
    """Also predict whether a row's second half follows its first half (layout "sentence-pairs")."""

    def row_layout(self) -> str:
        return "sentence-pairs" if self.next_sentence else self.layout

    def bucket_lengths(self, manifest: DatasetManifest) -> tuple[int, ...]:
        if self.next_sentence:
            return (_max_row_tokens(manifest),)
        return super().bucket_lengths(manifest)

    def input_spec(self, manifest: DatasetManifest) -> InputSpec:
        if self.next_sentence:
            return InputSpec(max_lengths=(_max_row_tokens(manifest),))
        return super().input_spec(manifest)

    def check_dataset(self, manifest: DatasetManifest) -> None:
        super().check_dataset(manifest)
        if manifest.tokenizer.mask_token_id is None:
            raise SettingsError(
                "the tokenizer has no mask token", "prepare the data with one that has a mask token"
            )

    @property
    def head(self) -> HeadKind:
        return "pairs" if self.next_sentence else "masked"

    def text_columns(self) -> tuple[str, ...]:
        return HALVES if self.next_sentence else super().text_columns()

    def build_module(self, model: Model, manifest: DatasetManifest, seed: int) -> TextModule:
        from regauge.models.modules import MaskedLanguageModel, NextSentenceModel

        kind = NextSentenceModel if self.next_sentence else MaskedLanguageModel
        return kind(*self.build_model(model, manifest, seed))

    def build_batch(
        self, rows: DatasetRows, plan: MicrobatchPlan, key: RandomKey, config: CollatorConfig
    ) -> Arrays:
        """Mask a fixed number of positions, K, in each row; surplus ones in short rows weigh 0.

        Adds `masked` (positions), `labels` and `weights`, all [batch, K]. Positions and replacement
        tokens depend only on (seed, epoch, row).
        """
        import numpy as np

        from regauge.data.randomness import hash_keys

        build = _build_pair_batch if self.next_sentence else self.build_packed_batch
        arrays = build(rows, plan, key, config)
        tokens = arrays["tokens"]
        eligible = (arrays["segments"] > 0) & ~np.isin(tokens, config.special_ids)
        max_masked = max(1, round(self.mlm_probability * plan.length))
        row_keys = plan.row_numbers[:, None]
        priority = hash_keys(key.seed, key.epoch, row_keys, np.arange(plan.length))
        priority[~eligible] = np.iinfo(np.uint64).max
        masked = np.argsort(priority, axis=1, kind="stable")[:, :max_masked]
        labels = np.take_along_axis(tokens, masked, 1)
        num_masked = np.minimum(np.rint(self.mlm_probability * eligible.sum(1)), max_masked)
        weights = (np.arange(max_masked) < num_masked[:, None]).astype(np.float32)
        draws = hash_keys(key.seed, key.epoch, row_keys, masked, 1)
        replacements = self._replacement_tokens(labels, draws, config)
        np.put_along_axis(tokens, masked, np.where(weights > 0, replacements, labels), 1)
        return {
            **arrays,
            "masked": masked.astype(np.int64),
            "labels": labels,
            "weights": weights,
        }

    def loss(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the loss over predicted tokens, plus for each token its row's pair loss.

        So both losses have the same weight, and a global batch can be split anywhere.
        """
        loss, weight = super().loss(output, batch)
        if self.next_sentence:
            loss = loss + (output["pair_nll"] * batch["weights"].sum(1)).sum()
        return loss, weight

    def metric_sums(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> MetricSums:
        sums = super().metric_sums(output, batch)
        if not self.next_sentence:
            return sums
        real = (batch["segments"][:, 0] > 0).float()
        accuracy = ((output["pair_correct"] * real).sum(), real.sum())
        return {
            "loss": self.loss(output, batch),
            NLL: sums.pop("loss"),
            **sums,
            "next_sentence_accuracy": accuracy,
        }

    @staticmethod
    def _replacement_tokens(
        labels: np.ndarray, draws: np.ndarray, config: CollatorConfig
    ) -> np.ndarray:
        """Return the input token for each label: 80 % mask, 10 % random, 10 % unchanged.

        All arrays are [batch, K]; `draws` are uniform 64-bit integers.
        """
        import numpy as np

        decile = draws % np.uint64(10)
        random = (draws // np.uint64(10) % np.uint64(config.vocab_size)).astype(np.int32)
        mask = np.int32(config.mask_id if config.mask_id is not None else config.pad_id)
        return np.where(decile < 8, mask, np.where(decile == 8, random, labels))  # noqa: PLR2004


def _build_pair_batch(
    rows: DatasetRows, plan: MicrobatchPlan, key: RandomKey, config: CollatorConfig
) -> Arrays:
    """Build token arrays with `types`, [batch, length], and `next_sentence_label`, [batch].

    Types are 1 in second halves. As in BERT, the label is 0 if the second half follows the first,
    and 1 if it is from another row.
    """
    import numpy as np

    from regauge.data.batches import take_rows
    from regauge.data.row_order import PADDING
    from regauge.tasks import _arrays

    real = plan.row_numbers >= 0
    partners = np.full_like(plan.row_numbers, PADDING)
    partners[real] = choose_partners(plan.row_numbers[real], len(rows), key)
    records = zip(take_rows(rows, plan.row_numbers), take_rows(rows, partners), strict=True)
    pairs = [
        (record[HALVES[0]], partner[HALVES[1]]) if record and partner else None
        for record, partner in records
    ]
    texts = [None if pair is None else np.concatenate(pair) for pair in pairs]
    arrays = _arrays.build_text_arrays(texts, plan, key, config)
    types = _arrays.build_token_types(
        arrays, [0 if pair is None else len(pair[0]) for pair in pairs]
    )
    is_random = real & (partners != plan.row_numbers % len(rows))
    return {**arrays, "types": types, "next_sentence_label": is_random.astype(np.int64)}


def choose_partners(
    row_numbers: np.ndarray,  # [rows], 0 or more
    count: int,
    key: RandomKey,
) -> np.ndarray:  # [rows], 0 … count - 1
    """Return each row's partner for the second half: itself for about half of the rows.

    Depends only on (seed, epoch, row). In a one-row dataset the partner is the row itself.
    """
    import numpy as np

    from regauge.data.randomness import hash_keys

    numbers = row_numbers % count
    is_random = hash_keys(key.seed, key.epoch, row_numbers, IS_RANDOM_KEY) % np.uint64(2)
    steps = hash_keys(key.seed, key.epoch, row_numbers, OFFSET_KEY) % np.uint64(max(count - 1, 1))
    offsets = (is_random * (steps + np.uint64(1))).astype(np.int64)
    return np.asarray((numbers + offsets) % count)


def _max_row_tokens(manifest: DatasetManifest) -> int:
    return sum(manifest.columns[name].max_length for name in HALVES)
