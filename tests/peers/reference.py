"""Outputs of transformers and sentence-transformers, for each text alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peers.texts import TEXTS
from sentence_transformers import CrossEncoder, SentenceTransformer
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

NEW_TOKENS = 8
"""Most tokens that a causal model generates."""


def encode(folder: Path, texts: Sequence[str] = TEXTS, **options: Any) -> np.ndarray:
    """Return the vectors of sentence-transformers, [texts, width]."""
    encoder = SentenceTransformer(str(folder), device="cpu")
    return np.stack([encoder.encode([text], **options)[0] for text in texts])


def score(folder: Path, firsts: Sequence[str], seconds: Sequence[str]) -> np.ndarray:
    """Return the scores of pairs by sentence-transformers, [pairs, 1]."""
    encoder = CrossEncoder(str(folder), device="cpu")
    return np.stack([encoder.predict([pair]) for pair in zip(firsts, seconds, strict=True)])


def compute_logits(folder: Path, *columns: Sequence[str]) -> torch.Tensor:
    """Return the logits of a classifier of transformers, [texts or pairs, labels]."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    logits = []
    for texts in zip(*columns, strict=True):
        inputs = tokenizer(*([text] for text in texts), truncation=True, return_tensors="pt")
        with torch.no_grad():
            logits.append(model(**inputs).logits[0])
    return torch.stack(logits)


def generate(folder: Path, limit: int) -> list[list[int]]:
    """Return the tokens that transformers generates for TEXTS, without the end token.

    Of a prompt that is too long, the last tokens count, after the special tokens.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder, truncation_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    declared = model.generation_config.eos_token_id
    ends = declared if isinstance(declared, list) else [declared]
    options: Any = {
        "tokenizer": tokenizer,
        "max_new_tokens": NEW_TOKENS,
        "do_sample": False,
        "pad_token_id": tokenizer.pad_token_id,
        "return_dict_in_generate": False,
    }
    generated = []
    for text in TEXTS:
        inputs = tokenizer([text], truncation=True, max_length=limit, return_tensors="pt")
        rows = model.generate(**inputs, **options)
        tokens = rows[0, inputs["input_ids"].shape[1] :].tolist()
        end = next((index for index, token in enumerate(tokens) if token in ends), len(tokens))
        generated.append(tokens[:end])
    return generated


def decode(folder: Path, rows: list[list[int]]) -> list[str]:
    """Return the texts of generated tokens."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [tokenizer.decode(row, skip_special_tokens=True) for row in rows]
