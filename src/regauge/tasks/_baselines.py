"""Scores of simple models that are fitted on training rows, as baselines of an evaluation."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from torch import Tensor

MAX_WEIGHTS = 1 << 23
"""Maximum tokens x classes in a logistic regression; fitting takes 80 bytes for each."""
MAX_STEPS = 200


def score_by_counts(
    train: Sequence[np.ndarray], texts: Sequence[np.ndarray], targets: Tensor, *, several: bool
) -> Tensor | None:
    """Score texts, [texts, classes], by a logistic regression on tf-idf of their tokens.

    `targets` are the training texts' classes, [train, classes] fp32; with `several`, each class is
    fitted on its own. Features and penalty are scikit-learn's defaults (`TfidfVectorizer`,
    `LogisticRegression`). Returns None if there are too many weights.
    """
    import torch
    from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

    num_tokens = 1 + max(int(text.max(initial=0)) for text in (*train, *texts))
    if num_tokens * targets.shape[1] > MAX_WEIGHTS:
        return None
    counts = _count_tokens(train, num_tokens)
    inverse = _invert_frequencies(counts)
    features = _weight(counts, inverse)
    weights = torch.zeros(num_tokens, targets.shape[1], requires_grad=True)
    bias = torch.zeros(targets.shape[1], requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weights, bias], max_iter=MAX_STEPS, history_size=10, line_search_fn="strong_wolfe"
    )
    measure = binary_cross_entropy_with_logits if several else cross_entropy

    def compute_loss() -> Tensor:
        optimizer.zero_grad()
        scores = torch.sparse.mm(features, weights) + bias
        loss = measure(scores, targets, reduction="sum") + weights.square().sum() / 2
        loss.backward()
        return loss

    optimizer.step(compute_loss)
    heldout = _weight(_count_tokens(texts, num_tokens), inverse)
    scores: Tensor = torch.sparse.mm(heldout, weights) + bias
    return scores.detach()


def compare_by_counts(
    train: Sequence[np.ndarray], lefts: Sequence[np.ndarray], rights: Sequence[np.ndarray]
) -> Tensor:
    """Return the cosines of text pairs, [pairs], between tf-idf vectors of their tokens.

    The document frequencies are those of the training texts, as in scikit-learn's defaults.
    """
    num_tokens = 1 + max(int(text.max(initial=0)) for text in (*train, *lefts, *rights))
    inverse = _invert_frequencies(_count_tokens(train, num_tokens))
    left, right = (_weight(_count_tokens(texts, num_tokens), inverse) for texts in (lefts, rights))
    cosines: Tensor = (left * right).sum(1).to_dense()
    return cosines


def _invert_frequencies(counts: Tensor) -> Tensor:
    """Return each token's inverse document frequency, [tokens]; counts are [texts, tokens]."""
    import torch

    rows = torch.bincount(counts.indices()[1], minlength=counts.shape[1])
    return torch.log((1 + counts.shape[0]) / (1 + rows)) + 1


def _count_tokens(texts: Sequence[np.ndarray], num_tokens: int) -> Tensor:
    """Count each text's tokens, sparse [texts, tokens] fp32."""
    import numpy as np
    import torch

    rows = np.repeat(np.arange(len(texts)), [len(text) for text in texts])
    indices = torch.from_numpy(np.stack([rows, np.concatenate(texts).astype(np.int64)]))
    ones = torch.ones(indices.shape[1])
    return torch.sparse_coo_tensor(
        indices, ones, (len(texts), num_tokens), check_invariants=True
    ).coalesce()


def _weight(counts: Tensor, inverse: Tensor) -> Tensor:
    """Weight counts by the inverse document frequencies, and scale rows to length 1."""
    import torch

    rows, tokens = counts.indices()
    values = counts.values() * inverse[tokens]
    lengths = torch.zeros(counts.shape[0]).index_add_(0, rows, values.square()).sqrt()
    return torch.sparse_coo_tensor(
        counts.indices(), values / lengths[rows], counts.shape, check_invariants=True
    ).coalesce()
