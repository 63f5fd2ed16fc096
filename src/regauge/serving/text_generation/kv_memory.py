"""Memory of the key-value cache: pages become resident when they are first written.

transformers writes zeros to the whole cache when it builds it, and keeps the blocks of ended
requests, for prompts with equal prefixes, until the cache is full.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from collections.abc import Callable

PREFIX_SHARE = 8
"""One of this many blocks may keep tokens of ended requests for prompts with equal prefixes."""


class MappedZeros(TorchFunctionMode):
    """Lets `torch.zeros` map bytes in host memory instead of writing them.

    Example: `with MappedZeros(): cache = torch.zeros(2**33, dtype=torch.uint8)` takes no memory.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call a torch function, or map the zeros for it."""
        del types
        options = kwargs or {}
        is_mapped = func is torch.zeros and options.get("dtype") is torch.uint8
        if is_mapped and torch.empty(0, device=options.get("device")).is_cpu:
            return torch.from_numpy(np.zeros(args, np.uint8))
        return func(*args, **options)


def limit_prefixes(cache: Any, max_request_tokens: int) -> None:
    """Free the oldest blocks that ended requests have left in transformers' cache.

    An eighth of the blocks, or those of the longest request, stay for prompts with equal prefixes.
    Freed blocks are used next, so the cache does not reach for unused memory.
    """
    for allocator in cache.cache_allocators.values():
        ledger = allocator.ledger
        longest = -(-max_request_tokens // allocator.tokens_per_page)
        count = len(ledger.cached_blocks) - max(allocator.num_blocks // PREFIX_SHARE, longest)
        evicted = list(islice(ledger.cached_blocks, max(0, count)))
        for block in evicted:
            del ledger.cached_blocks[block]
            del ledger.hash_to_block[ledger.block_to_hash.pop(block)]
        cache.pool.free_blocks(allocator.index, evicted)


def count_blocks(cache: Any) -> tuple[int, int]:
    """Return the blocks that running requests use, and all blocks in transformers' cache."""
    free_bytes = cache.compute_free_capacity(relative=False)
    for allocator in cache.cache_allocators.values():
        free_bytes += len(allocator.ledger.cached_blocks) * allocator.bytes_per_block
    total_bytes = cache.num_sectors * cache.bytes_per_sector
    return round(cache.num_blocks * (1 - free_bytes / total_bytes)), cache.num_blocks
