"""Next-sentence prediction batches: two text halves, from the same row or from two rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from regauge.tasks._fields import field_histogram

if TYPE_CHECKING:
    import numpy as np

    from regauge.data.batches import Arrays, MicrobatchPlan, RandomKey
    from regauge.data.dataset import DatasetManifest, DatasetRows
    from regauge.data.loader import CollatorConfig

HALVES = ("first", "second")
IS_RANDOM_KEY, OFFSET_KEY = -1, -2
"""Keys for a row's two random draws; token draws have the keys 0 and above."""


def build_pair_batch(
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


def max_row_tokens(manifest: DatasetManifest) -> int:
    return sum(manifest.columns[name].max_length for name in HALVES)


def real_token_fraction(manifest: DatasetManifest) -> float:
    """Return the fraction of real tokens if every row is padded to the maximum length."""
    histograms = [field_histogram(manifest, name) for name in HALVES]
    tokens = sum(length * n for counts in histograms for length, n in enumerate(counts))
    return tokens / max(max_row_tokens(manifest) * sum(histograms[0]), 1)
