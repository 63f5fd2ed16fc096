"""Metrics of language models, by transformers and plain torch, from records or rows.

Each segment is computed alone, without padding, on the logits in float64. The tokens of causal
models come from the records by the tokenizer in the model's folder.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
)

from regauge.config import parse_choice
from regauge.data.dataset import Dataset
from regauge.data.loader import build_loader
from regauge.system.processes import World

Records = list[dict[str, Any]]
Text = tuple[list[int], int]
"""Tokens, and the index of the first one that is predicted."""
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'user' %}{{ bos_token or cls_token }}"
    "{{ message.content }}{{ sep_token }}{% else %}{{ message.content }}{{ sep_token }}"
    "{% endif %}{% endfor %}"
)
"""A special token separates the messages, so that their texts are tokenized apart."""
BETA, SMOOTHING = 0.3, 0.1


def save_start(folder: Path, data: Path, config: dict[str, Any]) -> None:
    """Write a Llama with random weights for the tokenizer of a dataset."""
    tokenizer = AutoTokenizer.from_pretrained(data / "tokenizer")
    torch.manual_seed(5)
    fields = LlamaConfig(**config, vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id)
    LlamaForCausalLM(fields).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def encode(folder: Path, texts: Sequence[str]) -> list[list[int]]:
    """Return the tokens of texts without special tokens."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids: list[list[int]] = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    return ids


def split_documents(folder: Path, records: Records, length: int) -> list[Text]:
    """Return pieces of documents, [CLS] tokens [SEP] each; the first token is not predicted."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    first, last, size = tokenizer.cls_token_id, tokenizer.sep_token_id, length - 2
    return [
        ([first, *tokens[start : start + size], last], 1)
        for tokens in encode(folder, [record["text"] for record in records])
        for start in range(0, len(tokens), size)
    ]


def build_answers(folder: Path, records: Records, prompt: str, answer: str) -> list[Text]:
    """Return the tokens of TEMPLATE for a prompt field and an answer field."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts, answers = (
        encode(folder, [record[name].strip() for record in records]) for name in (prompt, answer)
    )
    first, last = tokenizer.cls_token_id, tokenizer.sep_token_id
    return [
        ([first, *question, last, *reply, last], len(question) + 2)
        for question, reply in zip(prompts, answers, strict=True)
    ]


def predict_tokens(folder: Path, texts: Sequence[Text]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the log-probability of each predicted token, and whether it is the likeliest."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    for tokens, first in texts:
        labels = torch.tensor(tokens)[first:]
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0, first - 1 : -1].double()
        chosen = torch.log_softmax(logits, -1).gather(1, labels[:, None])[:, 0]
        yield chosen, logits.argmax(-1) == labels


def average_tokens(pairs: Iterator[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Return the mean over all tokens, whatever their text."""
    chosen, correct = map(torch.cat, zip(*pairs, strict=True))
    loss = -chosen.mean().item()
    return {
        "loss": loss,
        "perplexity": math.exp(loss),
        "accuracy": correct.double().mean().item(),
        "items": len(chosen),
    }


def measure_next_tokens(folder: Path, texts: Sequence[Text]) -> dict[str, float]:
    return average_tokens(predict_tokens(folder, texts))


def measure_preferences(folder: Path, start: Path, records: Records) -> dict[str, float]:
    """Return the loss and the rewards as in TRL's DPOTrainer, whose reference is `start`.

    The loss is "sigmoid" with `label_smoothing`; a reward is beta times the difference between the
    log-probabilities of the answer by the model and by the reference.
    """
    rewards = []
    for name in ("chosen", "rejected"):
        texts = build_answers(folder, records, "prompt", name)
        policy, reference = (
            torch.stack([chosen.sum() for chosen, _ in predict_tokens(path, texts)])
            for path in (folder, start)
        )
        rewards.append(BETA * (policy - reference))
    chosen, rejected = rewards
    margins = chosen - rejected
    wins, losses = torch.log(torch.sigmoid(margins)), torch.log(torch.sigmoid(-margins))
    loss = -(1 - SMOOTHING) * wins - SMOOTHING * losses
    means = {
        "loss": loss,
        "accuracy": (chosen > rejected).double(),
        "chosen_reward": chosen,
        "rejected_reward": rejected,
        "reward_margin": margins,
    }
    return {name: value.mean().item() for name, value in means.items()} | {"items": len(records)}


def measure_masked_tokens(
    folder: Path, data: Path, task: dict[str, Any], seed: int
) -> dict[str, float]:
    """Return the metrics over the masked tokens, whose positions the dataset's loader draws."""
    model = AutoModelForMaskedLM.from_pretrained(folder, attn_implementation="eager").eval()
    dataset, settings = Dataset(data), parse_choice("tasks", task)
    loader = build_loader(
        settings,
        dataset,
        "heldout",
        world=World(),
        rows=4,
        bucket_lengths=settings.bucket_lengths(dataset.manifest),
        seed=seed,
    )
    return average_tokens(
        fill_masks(model, row)
        for batch in loader.load_evaluation_batches(np.arange(len(loader)))[0]
        for row in list_rows(batch)
    )


def list_rows(batch: dict[str, np.ndarray]) -> Iterator[dict[str, Tensor]]:
    names = ("tokens", "segments", "masked", "labels", "weights")
    for index in np.flatnonzero(batch["real"]):
        yield {name: torch.from_numpy(batch[name][index]).long() for name in names}


def fill_masks(model: Any, row: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each masked token in a row, and whether it is the likeliest."""
    logits = torch.zeros(len(row["tokens"]), model.config.vocab_size, dtype=torch.float64)
    for number in range(1, int(row["segments"].max()) + 1):
        places = row["segments"] == number
        with torch.no_grad():
            logits[places] = model(row["tokens"][places][None]).logits[0].double()
    is_label = row["weights"] > 0
    labels, selected = row["labels"][is_label], logits[row["masked"][is_label]]
    chosen = torch.log_softmax(selected, -1).gather(1, labels[:, None])[:, 0]
    return chosen, selected.argmax(-1) == labels
