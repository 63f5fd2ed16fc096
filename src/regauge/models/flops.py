"""What a model consists of, and what a token of it costs: exact on the meta device, too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from regauge.models.architectures import blocks

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

FLOPS = "6 N + 12 L h S a token (Chowdhery et al., 2022, appendix B), without heads"
"""N: weights of the blocks that enter matrix products; L blocks; h: width of the attention; S: a
row's tokens. A weight that is not trained costs 4 instead of 6: it has no gradient."""


@dataclass(frozen=True)
class Counts:
    """Numbers of weights; a tied one counts once."""

    all: int
    trained: int
    embedding: int
    blocks: int
    matmul: int
    """Of the blocks, those that enter matrix products."""


def counts(module: nn.Module) -> Counts:
    """Return how many weights a module has of each kind."""
    tables = [part for part in module.modules() if isinstance(part, nn.Embedding)]
    repeated = blocks(module)
    return Counts(
        all=_total(module.parameters()),
        trained=_total(value for value in module.parameters() if value.requires_grad),
        embedding=_total({id(part.weight): part.weight for part in tables}.values()),
        blocks=_total(value for block in repeated for value in block.parameters()),
        matmul=_total(_products(repeated or [module])),
    )


def flops_per_token(model: Any, length: int) -> float:
    """Return the floating-point operations that training on one token of a row takes, see `FLOPS`.

    The first block's inputs need no gradients where nothing before it is trained: then it is a
    little less. A model that has no blocks is one.
    """
    config = model.config
    weights = list(_products(blocks(model) or [model]))
    trained = _total(value for value in weights if value.requires_grad)
    if not hasattr(config, "num_hidden_layers"):  # a user's own, of which no attention is known
        return float(4 * _total(weights) + 2 * trained)
    own = getattr(config, "head_dim", None)
    width = own * config.num_attention_heads if own else config.hidden_size
    attention = 12 * config.num_hidden_layers * width * length
    return float(4 * _total(weights) + 2 * trained + attention)


def _products(repeated: Iterable[nn.Module]) -> Iterable[Tensor]:
    """Yield matrices; rows of an embedding are looked up, and multiply nothing."""
    parts = (part for block in repeated for part in block.modules())
    found = (part for part in parts if not isinstance(part, nn.Embedding))
    return (value for part in found for value in part.parameters(recurse=False) if value.ndim > 1)


def _total(values: Iterable[Tensor]) -> int:
    return sum(value.numel() for value in values)
