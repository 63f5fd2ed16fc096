"""A tokenizer as a folder: trained here or brought along, used without torch and transformers.

A trained one is a byte-level BPE, which is deterministic (WordPiece training is not). The folder is
what `transformers.AutoTokenizer.from_pretrained` loads. Text never turns into special tokens:
a document that speaks of "[MASK]" holds no mask.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer, decoders, models, normalizers, processors, trainers
from tokenizers import pre_tokenizers as cutting

from regauge.data.bpe_cache import words_of
from regauge.data.dataset import TOKENIZER, TokenizerFacts
from regauge.errors import DataError
from regauge.files import sha256

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from regauge.data import settings
    from regauge.data.bpe_cache import Words

CONFIG = "tokenizer_config.json"
ROLES = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
LETTERS = 3
"""Of a token that is taken for a word, at least."""
_PARTS = ("*.json", "*.txt", "*.model", "*.jinja")
_NAMES = ("tokenizer", "special", "added", "vocab", "merges", "chat")
"""What the files of a tokenizer end in, and what they begin with."""
_UNBOUNDED = int(1e30)
"""What transformers writes for a tokenizer without a longest length."""


class Pair(NamedTuple):
    """Two texts as one."""

    ids: np.ndarray
    start: int
    """How many tokens are of the first type: those behind them are the second text's."""
    cut: bool


class Encoder:
    """A tokenizer's folder, opened: texts in, token ids out."""

    def __init__(self, folder: Path, *, closed: bool = True, lowercase: bool = False) -> None:
        """Open a folder; unless `closed`, a text ends as the tokenizer says, perhaps in nothing.

        With `lowercase` what is no special token is written small first.
        """
        self.folder = folder
        self._tokenizer = _open(folder)
        if lowercase:
            own = self._tokenizer.normalizer
            both = [normalizers.Lowercase(), *([own] if own else [])]
            self._tokenizer.normalizer = normalizers.Sequence(both)
        self._config = _config(folder)
        self.prefix, self.suffix = self._wrapping(closed=closed)
        self.facts = self._facts(folder)
        added = self._tokenizer.get_added_tokens_decoder().values()
        self.special = tuple(token.content for token in added if token.special)
        """How the special tokens are written."""

    def encode(self, texts: Sequence[str], *, special: bool = False) -> list[np.ndarray]:
        """Return the ids of every text as int32; no special token is added.

        With `special` one that is written in a text is that token, and otherwise some letters.
        """
        words = None if special else self._words
        found = [words.ids(text) if words is not None else None for text in texts]
        rest = [text for text, ids in zip(texts, found, strict=True) if ids is None]
        self._tokenizer.encode_special_tokens = not special
        encoded = iter(self._tokenizer.encode_batch_fast(rest, add_special_tokens=False))
        return [
            np.array(next(encoded).ids, dtype=np.int32) if ids is None else ids for ids in found
        ]

    def pairs(self, firsts: Sequence[str], seconds: Sequence[str], limit: int) -> list[Pair]:
        """Return pairs of texts, each as one, in the tokenizer's own form.

        Of one that is longer than the limit, tokens are cut off the end of the longer text.
        """
        self._tokenizer.encode_special_tokens = False
        self._tokenizer.enable_truncation(limit, strategy="longest_first")
        try:
            found = self._tokenizer.encode_batch_fast(list(zip(firsts, seconds, strict=True)))
        finally:
            self._tokenizer.no_truncation()
        return [
            Pair(np.array(each.ids, np.int32), each.type_ids.count(0), bool(each.overflowing))
            for each in found
        ]

    def plain_words(self) -> list[str]:
        """Return the tokens that are letters alone, three or more, as texts, sorted."""
        ids = sorted(set(self._tokenizer.get_vocab().values()))
        written = (self._tokenizer.decode([each]).strip() for each in ids)
        return sorted({word for word in written if len(word) >= LETTERS and word.isalpha()})

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, without special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def opened(self, ids: np.ndarray) -> np.ndarray:
        """Return the ids behind the special tokens that open a text: something is to follow."""
        return np.concatenate([self.prefix, ids])

    def wrap(self, ids: np.ndarray) -> np.ndarray:
        """Return the ids between the special tokens that open and close a text."""
        return np.concatenate([self.prefix, ids, self.suffix])

    @property
    def overhead(self) -> int:
        """Special tokens around a text."""
        return len(self.prefix) + len(self.suffix)

    @cached_property
    def _words(self) -> Words | None:
        """Return them when they are first needed: they are found in the whole of the tokenizer."""
        return words_of(self._tokenizer)

    def _id(self, *roles: str) -> int | None:
        """Return the id of the first of these roles that the tokenizer fills."""
        for role in roles:
            token = self._config.get(f"{role}_token")
            text = token.get("content") if isinstance(token, dict) else token
            found = self._tokenizer.token_to_id(text) if text else None
            if found is not None:
                return int(found)
        return None

    def _wrapping(self, *, closed: bool) -> tuple[np.ndarray, np.ndarray]:
        bare = self._tokenizer.encode("a", add_special_tokens=False).ids
        full = self._tokenizer.encode("a", add_special_tokens=True).ids
        at = next((n for n in range(len(full)) if full[n : n + len(bare)] == bare), 0)
        prefix, suffix = full[:at], full[at + len(bare) :]
        if closed and not suffix and (end := self._id("sep", "eos")) is not None:
            suffix = [end]
        return np.array(prefix, dtype=np.int32), np.array(suffix, dtype=np.int32)

    def _facts(self, folder: Path) -> TokenizerFacts:
        added = self._tokenizer.get_added_tokens_decoder()
        special = {number for number, token in added.items() if token.special}
        roles = ("pad", "unk", "cls", "sep", "mask", "bos", "eos")
        special |= {found for role in roles if (found := self._id(role)) is not None}
        pad = self._id("pad", "eos", "unk")
        return TokenizerFacts(
            sha256=sha256(folder / TOKENIZER),
            vocabulary=max(self._tokenizer.get_vocab().values()) + 1,
            pad=0 if pad is None else pad,
            mask=self._id("mask"),
            separator=self._id("sep", "eos"),
            special=tuple(sorted(special)),
        )


def train(texts: Iterator[list[str]], wanted: settings.Tokenizer, folder: Path) -> None:
    """Train a byte-level BPE on batches of texts and save it as a folder."""
    tokenizer = Tokenizer(models.BPE(unk_token=ROLES["unk"]))
    tokenizer.normalizer = _normalizer(wanted.normalize)
    tokenizer.pre_tokenizer = cutting.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=wanted.vocabulary,
        min_frequency=wanted.minimum_count,
        special_tokens=list(ROLES.values()),
        initial_alphabet=sorted(cutting.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    ends = [(ROLES[role], tokenizer.token_to_id(ROLES[role])) for role in ("cls", "sep")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / TOKENIZER))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": _UNBOUNDED,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,
        **{f"{role}_token": token for role, token in ROLES.items()},
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def copy(source: Path, folder: Path) -> None:
    """Copy a tokenizer's files, converted by transformers where it has no `tokenizer.json`."""
    check(source)
    folder.mkdir(parents=True)
    if (source / TOKENIZER).exists():
        for path in files(source):
            shutil.copyfile(path, folder / path.name)
        return
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(str(source)).save_pretrained(str(folder))


def check(source: Path) -> None:
    """Raise DataError for a folder that holds no tokenizer."""
    if not source.is_dir():
        raise DataError(f"no tokenizer folder {source}", "correct tokenizer.path")
    if not any(
        (source / name).exists() for name in (TOKENIZER, CONFIG, "vocab.txt", "tokenizer.model")
    ):
        raise DataError(f"{source} holds no tokenizer", "name a folder with a tokenizer.json")


def check_same(dataset: Path, model: Path) -> None:
    """Raise DataError where a model's folder has a tokenizer that is not a prepared dataset's.

    How a library cut texts or filled them up last, which it notes in the file, does not count.
    """
    own, other = dataset / "tokenizer" / TOKENIZER, model / TOKENIZER
    if not (own.exists() and other.exists()) or sha256(own) == sha256(other):
        return
    if _open(own.parent).to_str() != _open(model).to_str():
        raise DataError(
            f"{model} was trained with another tokenizer than {dataset} was prepared with",
            f'prepare the data with tokenizer.path = "{model}"',
        )


def fingerprint(source: Path) -> str:
    """Return a hash of what defines a tokenizer's folder; raises DataError for none."""
    check(source)
    facts = "".join(f"{path.name} {sha256(path)}\n" for path in files(source))
    return hashlib.sha256(facts.encode()).hexdigest()


def files(source: Path) -> list[Path]:
    """Return the files of a folder that make up its tokenizer, sorted."""
    found = (path for pattern in _PARTS for path in source.glob(pattern))
    return sorted(path for path in found if path.name.startswith(_NAMES))


def _open(folder: Path) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
    except Exception as error:  # noqa: BLE001 (the library raises Exception itself)
        raise DataError(f"{folder / TOKENIZER} cannot be read: {error}", "replace it") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def _config(folder: Path) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for name in ("special_tokens_map.json", CONFIG):
        if (folder / name).exists():
            merged |= json.loads((folder / name).read_text())
    return merged or {f"{role}_token": token for role, token in ROLES.items()}


def _normalizer(kind: str) -> normalizers.Normalizer | None:
    if kind == "lowercase":
        return normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    return normalizers.NFC() if kind == "nfc" else None
