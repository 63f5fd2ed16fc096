"""Trains a language model run file in a minimal loop for one device, as an alternating program.

The loop has bf16 weights with fp32 masters, an encoder compiled as a whole, and one stream of text
cut into rows. It computes the head on masked positions alone, clips gradients and uses fused AdamW.
It has no checkpoints, no metrics and no resumable order: it shows the speed of the device without
these.

    python benchmarks/peer_minimal.py FOLDER RUN_FILE [--steps-per-turn N]
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from peer_parts import (
    PeerRun,
    build_evaluation,
    build_optimizer,
    build_run_module,
    parse_run,
    train_in_turns,
)
from peer_trainer import copy_to_transformers, read_token_rows
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

IGNORED = -100
MASK_SHARE, RANDOM_SHARE = 0.8, 0.1
"""Shares of the predicted tokens that the mask token or a random token replaces."""


def main() -> None:
    """Train until there is no other turn."""
    run = parse_run(__doc__)
    module = build_run_module(run)
    module.model = copy_to_transformers(module.model)
    evaluate = build_evaluation(run, module)
    train_in_turns(run, _train(run, module.model), evaluate)


def _train(run: PeerRun, model: Any) -> Iterator[int]:
    """Train, and yield the number of tokens of each step."""
    settings, is_mlm = run.settings, run.settings.task.kind == "mlm"
    model.train().to(run.device, run.dtype)
    encoder, head = torch.compile(model.base_model), _find_head(model)
    weights = list(model.parameters())
    masters = [value.detach().float() for value in weights]
    optimizer, schedule = build_optimizer(run, masters)
    batches, num_microbatches = _read_batches(run), settings.batch.rows // run.rows
    while True:
        count = 0
        for tokens in islice(batches, num_microbatches):
            inputs, positions, labels = (
                _mask_tokens(run, tokens) if is_mlm else _shift_labels(tokens)
            )
            states = encoder(input_ids=inputs).last_hidden_state
            predicted = (
                states
                if positions is None
                else states.gather(1, positions[..., None].expand(-1, -1, states.shape[-1]))
            )
            logits = head(predicted).flatten(0, 1).float()
            loss = cross_entropy(logits, labels.flatten(), ignore_index=IGNORED)
            (loss / num_microbatches).backward()
            count += tokens.numel()
        for master, value in zip(masters, weights, strict=True):
            master.grad = None if value.grad is None else value.grad.float()
            value.grad = None
        clip_grad_norm_(masters, settings.optimizer.max_grad_norm)
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            torch._foreach_copy_(weights, masters)
        yield count


def _find_head(model: Any) -> Any:
    """Return the module that computes logits from hidden states."""
    return model.cls if hasattr(model, "cls") else model.get_output_embeddings()


def _read_batches(run: PeerRun) -> Iterator[Tensor]:
    """Yield the tokens of a microbatch, [rows, length], reshuffled in each epoch."""
    length = run.settings.task.bucket_lengths(run.dataset.manifest)[-1]
    rows = torch.from_numpy(np.stack(read_token_rows(run.dataset, length, packed=True))).long()
    generator = torch.Generator().manual_seed(run.settings.seed)
    while True:
        for numbers in torch.randperm(len(rows), generator=generator).split(run.rows):
            if len(numbers) == run.rows:
                yield rows[numbers].to(run.device, non_blocking=True)


def _mask_tokens(run: PeerRun, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the masked tokens, the predicted positions and their labels."""
    tokenizer, share = run.dataset.manifest.tokenizer, run.settings.task.mlm_probability
    count = max(1, round(share * tokens.shape[1]))
    positions = torch.rand(tokens.shape, device=run.device).topk(count, dim=1).indices
    labels = tokens.gather(1, positions)
    draws = torch.rand(labels.shape, device=run.device)
    random_tokens = torch.randint_like(labels, tokenizer.vocab_size)
    mask_tokens = torch.full_like(labels, tokenizer.mask_token_id)
    replaced = torch.where(draws < MASK_SHARE + RANDOM_SHARE, random_tokens, labels)
    inputs = torch.where(draws < MASK_SHARE, mask_tokens, replaced)
    return tokens.scatter(1, positions, inputs), positions, labels


def _shift_labels(tokens: Tensor) -> tuple[Tensor, None, Tensor]:
    """Return each token with the next one as its label; the last token of a row has none."""
    labels = torch.full_like(tokens, IGNORED)
    labels[:, :-1] = tokens[:, 1:]
    return tokens, None, labels


if __name__ == "__main__":
    main()
