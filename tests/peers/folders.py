"""Folders as other libraries write them: tiny models with seeded weights and a tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peers.architectures import PEERS, POSITIONS, Peer
from peers.tokenization import build_tokenizer
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import (
    Dense,
    Normalize,
    Pooling,
    Transformer,
)
from transformers import (
    CONFIG_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)


def save_encoder(
    folder: Path,
    name: str,
    mode: str = "mean",
    limit: int = POSITIONS,
    *,
    is_normalized: bool = True,
    dense_width: int | None = None,
    **options: Any,
) -> Path:
    """Write a folder of sentence-transformers with one architecture, a pooling and a limit.

    `options` are arguments of SentenceTransformer, such as prompts. Returns the folder.
    """
    model_folder = save_model(folder / "model", name, AutoModel, limit)
    transformer = Transformer(str(model_folder))
    modules = [transformer, Pooling(transformer.get_embedding_dimension(), mode)]
    if dense_width is not None:
        torch.manual_seed(1)
        modules.append(Dense(transformer.get_embedding_dimension(), dense_width))
    modules += [Normalize()] * is_normalized
    encoder = SentenceTransformer(modules=modules, device="cpu", **options)
    encoder.save(str(folder / "encoder"), create_model_card=False)
    return folder / "encoder"


def save_classifier(folder: Path, name: str, limit: int = POSITIONS, **fields: Any) -> Path:
    """Write a folder of transformers with a classifier; `fields` are of its configuration."""
    return save_model(folder, name, AutoModelForSequenceClassification, limit, **fields)


def save_generator(folder: Path, name: str, limit: int = POSITIONS, **fields: Any) -> Path:
    """Write a folder of transformers with a causal model; `fields` are of its configuration."""
    return save_model(folder, name, AutoModelForCausalLM, limit, **fields)


def save_model(folder: Path, name: str, auto_class: Any, limit: int, **fields: Any) -> Path:
    """Write a folder of transformers with a model of one architecture and its tokenizer."""
    peer = PEERS[name]
    tokenizer = build_tokenizer(peer.tokenizer, limit, has_types=peer.has_types)
    config = build_config(name, peer, tokenizer, **fields)
    return save_folder(folder, build_model(auto_class, config), tokenizer)


def build_config(
    name: str, peer: Peer, tokenizer: PreTrainedTokenizerFast, **fields: Any
) -> PretrainedConfig:
    """Return the configuration of an architecture for a tokenizer."""
    ids = {
        f"{role}_token_id": getattr(tokenizer, f"{role}_token_id") for role in ("pad", "bos", "eos")
    }
    config_class = CONFIG_MAPPING[name]
    return config_class(**{"vocab_size": len(tokenizer), **ids, **peer.sizes, **fields})


def build_model(auto_class: Any, config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """Return a model with random weights, so large that every token changes the output."""
    torch.manual_seed(seed)
    model: PreTrainedModel = auto_class.from_config(config).float().eval()
    with torch.no_grad():
        for value in model.parameters():
            if value.dim() > 1:
                value.normal_(std=0.2)
            else:
                value.add_(torch.randn_like(value), alpha=0.1)
    return model


def save_folder(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> Path:
    """Write a model and its tokenizer as transformers does; return the folder."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
