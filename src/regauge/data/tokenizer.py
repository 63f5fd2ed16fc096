"""Tokenizers as folders: trained here or loaded, used without torch and transformers.

A trained tokenizer is a byte-level BPE, because its training is deterministic and that of WordPiece
is not. `transformers.AutoTokenizer.from_pretrained` can load the folder. Text never becomes a
special token: a document about "[MASK]" has no mask token.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from regauge.data.bpe_cache import build_cached_bpe
from regauge.data.dataset import TOKENIZER, TokenizerInfo
from regauge.errors import DataError
from regauge.files import sha256

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from regauge.data.bpe_cache import CachedBpe
    from regauge.data.settings import TokenizerSettings

CONFIG = "tokenizer_config.json"
ROLES = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
MIN_LETTERS = 3
"""Minimum number of letters of a token that counts as a word."""
_FILE_PATTERNS = ("*.json", "*.txt", "*.model", "*.jinja")
"""Patterns of the names of a tokenizer's files."""
_FILE_PREFIXES = ("tokenizer", "special", "added", "vocab", "merges", "chat")
"""Prefixes of the names of a tokenizer's files."""
_NO_MAX_LENGTH = int(1e30)
"""The `model_max_length` that transformers writes for a tokenizer without a maximum length."""


class EncodedPair(NamedTuple):
    """Two texts as one sequence."""

    ids: np.ndarray
    """Token ids with special tokens, [tokens] int32."""
    second_start: int
    """Index of the first token of the second text: the number of tokens of type 0."""
    is_truncated: bool
    """Whether tokens were removed to keep the length limit."""


class LoadedTokenizer:
    """A tokenizer that is loaded from a folder; it encodes texts as token ids."""

    def __init__(
        self, folder: Path, *, ensure_end_token: bool = True, lowercase: bool = False
    ) -> None:
        """Load a tokenizer from a folder.

        With `ensure_end_token`, a text ends with the end or separator token even if the tokenizer
        itself adds none. With `lowercase`, text is converted to lower case before normalization.
        """
        self.folder = folder
        self._tokenizer = _load(folder)
        if lowercase:
            normalizer = self._tokenizer.normalizer
            steps = [normalizers.Lowercase(), *([normalizer] if normalizer else [])]
            self._tokenizer.normalizer = normalizers.Sequence(steps)
        self._config = _read_config(folder)
        self.prefix, self.suffix = self._find_prefix_and_suffix(ensure_end_token=ensure_end_token)
        self.info = self._read_info(folder)
        added = self._tokenizer.get_added_tokens_decoder().values()
        self.special_tokens = tuple(token.content for token in added if token.special)
        """The special tokens as strings."""

    def encode(
        self, texts: Sequence[str], *, parse_special_tokens: bool = False
    ) -> list[np.ndarray]:
        """Return the ids of every text as int32, without added special tokens.

        With `parse_special_tokens`, a special token in a text becomes its id; otherwise it is plain
        text.
        """
        cached_bpe = None if parse_special_tokens else self._cached_bpe
        cached = [cached_bpe.encode(text) if cached_bpe is not None else None for text in texts]
        rest = [text for text, ids in zip(texts, cached, strict=True) if ids is None]
        self._tokenizer.encode_special_tokens = not parse_special_tokens
        encoded = iter(self._tokenizer.encode_batch_fast(rest, add_special_tokens=False))
        return [
            np.array(next(encoded).ids, dtype=np.int32) if ids is None else ids for ids in cached
        ]

    def encode_pairs(
        self, firsts: Sequence[str], seconds: Sequence[str], max_tokens: int
    ) -> list[EncodedPair]:
        """Return pairs of texts as sequences, in the format of the tokenizer.

        If a pair is longer than the limit, tokens are removed from the end of the longer text.
        """
        self._tokenizer.encode_special_tokens = self.splits_special_tokens
        self._tokenizer.enable_truncation(max_tokens, strategy="longest_first")
        try:
            encodings = self._tokenizer.encode_batch_fast(list(zip(firsts, seconds, strict=True)))
        finally:
            self._tokenizer.no_truncation()
        return [
            EncodedPair(
                np.array(encoding.ids, np.int32),
                encoding.type_ids.count(0),
                bool(encoding.overflowing),
            )
            for encoding in encodings
        ]

    def list_token_types(self, num_texts: int) -> list[int]:
        """Return the token types of a short text, or of a pair of two texts."""
        texts = ("a",) if num_texts == 1 else ("a", "a")
        return list(self._tokenizer.encode(*texts).type_ids)

    def list_words(self) -> list[str]:
        """Return the tokens that consist of three or more letters, as sorted texts."""
        token_ids = sorted(set(self._tokenizer.get_vocab().values()))
        tokens = (self._tokenizer.decode([token_id]).strip() for token_id in token_ids)
        return sorted({token for token in tokens if len(token) >= MIN_LETTERS and token.isalpha()})

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def add_prefix(self, ids: np.ndarray) -> np.ndarray:
        """Return the ids after the special tokens that open a text, for a model to continue."""
        return np.concatenate([self.prefix, ids])

    def add_special_tokens(self, ids: np.ndarray) -> np.ndarray:
        """Return the ids between the special tokens that open and close a text."""
        return np.concatenate([self.prefix, ids, self.suffix])

    @property
    def splits_special_tokens(self) -> bool:
        """Whether the folder declares that special tokens in a text are plain text."""
        return bool(self._config.get("split_special_tokens"))

    @property
    def num_special_tokens(self) -> int:
        """Number of special tokens around a text."""
        return len(self.prefix) + len(self.suffix)

    @cached_property
    def _cached_bpe(self) -> CachedBpe | None:
        """The cached encoder; it is built on first use, because that reads the whole tokenizer."""
        return build_cached_bpe(self._tokenizer)

    def _find_id(self, *roles: str) -> int | None:
        """Return the id of the first of these roles that the tokenizer defines."""
        for role in roles:
            token = self._config.get(f"{role}_token")
            text = token.get("content") if isinstance(token, dict) else token
            token_id = self._tokenizer.token_to_id(text) if text else None
            if token_id is not None:
                return int(token_id)
        return None

    def _find_prefix_and_suffix(self, *, ensure_end_token: bool) -> tuple[np.ndarray, np.ndarray]:
        plain_ids = self._tokenizer.encode("a", add_special_tokens=False).ids
        ids = self._tokenizer.encode("a", add_special_tokens=True).ids
        length = len(plain_ids)
        start = next((at for at in range(len(ids)) if ids[at : at + length] == plain_ids), 0)
        prefix, suffix = ids[:start], ids[start + length :]
        if ensure_end_token and not suffix and (end_id := self._find_id("sep", "eos")) is not None:
            suffix = [end_id]
        return np.array(prefix, dtype=np.int32), np.array(suffix, dtype=np.int32)

    def _read_info(self, folder: Path) -> TokenizerInfo:
        added = self._tokenizer.get_added_tokens_decoder()
        special_ids = {token_id for token_id, token in added.items() if token.special}
        roles = ("pad", "unk", "cls", "sep", "mask", "bos", "eos")
        special_ids |= {role_id for role in roles if (role_id := self._find_id(role)) is not None}
        pad_id = self._find_id("pad", "eos", "unk")
        return TokenizerInfo(
            sha256=sha256(folder / TOKENIZER),
            vocab_size=max(self._tokenizer.get_vocab().values()) + 1,
            pad_token_id=0 if pad_id is None else pad_id,
            mask_token_id=self._find_id("mask"),
            sep_token_id=self._find_id("sep", "eos"),
            special_token_ids=tuple(sorted(special_ids)),
        )


def train_tokenizer(texts: Iterator[list[str]], settings: TokenizerSettings, folder: Path) -> None:
    """Train a byte-level BPE on batches of texts and save it to a folder."""
    tokenizer = Tokenizer(models.BPE(unk_token=ROLES["unk"]))
    tokenizer.normalizer = _build_normalizer(settings.normalize)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=settings.vocab_size,
        min_frequency=settings.min_frequency,
        special_tokens=list(ROLES.values()),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    special_tokens = [(ROLES[role], tokenizer.token_to_id(ROLES[role])) for role in ("cls", "sep")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=special_tokens
    )
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / TOKENIZER))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": _NO_MAX_LENGTH,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,
        **{f"{role}_token": token for role, token in ROLES.items()},
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the files of a tokenizer; transformers converts it if it has no `tokenizer.json`."""
    check_tokenizer(source)
    folder.mkdir(parents=True)
    if (source / TOKENIZER).exists():
        for path in list_tokenizer_files(source):
            shutil.copyfile(path, folder / path.name)
        return
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(str(source)).save_pretrained(str(folder))


def check_tokenizer(source: Path) -> None:
    """Raise DataError if a folder has no tokenizer."""
    if not source.is_dir():
        raise DataError(f"no tokenizer folder {source}", "correct tokenizer.path")
    if not any(
        (source / name).exists() for name in (TOKENIZER, CONFIG, "vocab.txt", "tokenizer.model")
    ):
        raise DataError(
            f"{source} has no tokenizer", "set tokenizer.path to a folder with a tokenizer.json"
        )


def check_same_tokenizer(dataset: Path, model: Path) -> None:
    """Raise DataError if the tokenizer of a model's folder is not that of a prepared dataset.

    The truncation and padding that a library last stored in the file are ignored.
    """
    dataset_file, model_file = dataset / "tokenizer" / TOKENIZER, model / TOKENIZER
    if not (dataset_file.exists() and model_file.exists()):
        return
    if sha256(dataset_file) == sha256(model_file):
        return
    if _load(dataset_file.parent).to_str() != _load(model).to_str():
        raise DataError(
            f"{model} was trained with another tokenizer than {dataset} was prepared with",
            f'prepare the data with tokenizer.path = "{model}"',
        )


def hash_tokenizer(source: Path) -> str:
    """Return a hash of the files of a tokenizer; raises DataError if a folder has none."""
    check_tokenizer(source)
    lines = "".join(f"{path.name} {sha256(path)}\n" for path in list_tokenizer_files(source))
    return hashlib.sha256(lines.encode()).hexdigest()


def list_tokenizer_files(source: Path) -> list[Path]:
    """Return the files of a tokenizer's folder, sorted."""
    paths = (path for pattern in _FILE_PATTERNS for path in source.glob(pattern))
    return sorted(path for path in paths if path.name.startswith(_FILE_PREFIXES))


def _load(folder: Path) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
    except Exception as error:  # noqa: BLE001 (the library raises Exception itself)
        raise DataError(f"{folder / TOKENIZER} cannot be read: {error}", "replace it") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def _read_config(folder: Path) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for name in ("special_tokens_map.json", CONFIG):
        if (folder / name).exists():
            merged |= json.loads((folder / name).read_text(encoding="utf-8"))
    return merged or {f"{role}_token": token for role, token in ROLES.items()}


def _build_normalizer(kind: str) -> normalizers.Normalizer | None:
    if kind == "lowercase":
        return normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    return normalizers.NFC() if kind == "nfc" else None
