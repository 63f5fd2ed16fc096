"""Parameter counts and FLOPs of models; exact on the meta device, too.

Torch is imported by the functions that get a module.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor, nn

FLOPS_FORMULA = "6 N + 12 L h S a token (Chowdhery et al., 2022, appendix B), without heads"
"""N: weights of the blocks that enter matrix products; L: blocks; h: width of the attention; S: row
length in tokens. A frozen weight costs 4 instead of 6, because it lacks a gradient."""


@dataclass(frozen=True)
class ParameterCounts:
    """Numbers of parameters by kind; a tied weight counts once."""

    all: int
    trained: int
    embedding: int
    blocks: int
    matmul: int
    """Parameters of the blocks that enter matrix products."""


def count_parameters(module: nn.Module) -> ParameterCounts:
    """Count the parameters of a module by kind."""
    from torch import nn

    from regauge.models.architectures import find_blocks

    tables = [layer for layer in module.modules() if isinstance(layer, nn.Embedding)]
    blocks = find_blocks(module)
    return ParameterCounts(
        all=_num_elements(module.parameters()),
        trained=_num_elements(value for value in module.parameters() if value.requires_grad),
        embedding=_num_elements({id(table.weight): table.weight for table in tables}.values()),
        blocks=_num_elements(value for block in blocks for value in block.parameters()),
        matmul=_num_elements(_matmul_weights(blocks or [module])),
    )


def flops_per_token(model: Any, length: int) -> float:
    """Return the training FLOPs of one token in a row of `length` tokens, by FLOPS_FORMULA.

    This slightly overestimates models whose embeddings are frozen, because the first block then
    needs no input gradients. A model without blocks counts as one block.
    """
    from regauge.models.architectures import find_blocks

    config = model.config
    weights = list(_matmul_weights(find_blocks(model) or [model]))
    trained = _num_elements(value for value in weights if value.requires_grad)
    if not hasattr(config, "num_hidden_layers"):  # a custom module; its attention is unknown
        return compute_flops(_num_elements(weights), trained)
    head_dim = getattr(config, "head_dim", None)
    width = head_dim * config.num_attention_heads if head_dim else config.hidden_size
    attention = config.num_hidden_layers * width * length
    return compute_flops(_num_elements(weights), trained, attention)


def compute_flops(matmul: int, trained: int, attention: float = 0) -> float:
    """Return the FLOPs of a token, of which `attention` is L h S of FLOPS_FORMULA.

    `trained` counts the parameters of `matmul` that have a gradient.
    """
    return float(4 * matmul + 2 * trained + 12 * attention)


def _matmul_weights(blocks: Iterable[nn.Module]) -> Iterable[Tensor]:
    """Return the weights that are multiplied: all matrices except embedding tables."""
    from torch import nn

    layers = (layer for block in blocks for layer in block.modules())
    layers = (layer for layer in layers if not isinstance(layer, nn.Embedding))
    return (
        weight for layer in layers for weight in layer.parameters(recurse=False) if weight.ndim > 1
    )


def _num_elements(values: Iterable[Tensor]) -> int:
    return sum(value.numel() for value in values)
