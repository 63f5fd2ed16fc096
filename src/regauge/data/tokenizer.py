"""Tokenizers as folders: trained here or loaded, used without torch and transformers.

A trained tokenizer is a byte-level BPE, because its training is deterministic and WordPiece's is
not. `transformers.AutoTokenizer.from_pretrained` can load the folder. Text never becomes a special
token: a document about "[MASK]" does not contain a mask token.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

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

from regauge.data.byte_level_bpe import build_byte_level_bpe
from regauge.data.dataset import TOKENIZER, TokenizerInfo
from regauge.data.special_tokens import read_role_id, read_special_tokens
from regauge.data.tokenizer_config import (
    CONFIG,
    ROLES,
    TRAINED_ROLES,
    check_added_tokens,
    read_class_roles,
    read_declared_config,
    read_tokenizer_config,
    write_document,
)
from regauge.system.errors import DataError, first_line
from regauge.system.files import check_file, sha256
from regauge.system.json_files import find_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from regauge.data.byte_level_bpe import ByteLevelBpe
    from regauge.data.settings import TokenizerSettings

MIN_LETTERS = 3
"""Minimum letters for a token to count as a word."""
MORE_TEMPLATES = "additional_chat_templates"
"""Folder for a tokenizer's named chat templates, such as "tool_use"."""
_FILE_PATTERNS = ("*.json", "*.txt", "*.model", "*.jinja", f"{MORE_TEMPLATES}/*.jinja")
_FILE_PREFIXES = ("tokenizer", "special", "added", "vocab", "merges", "chat", MORE_TEMPLATES)
Side = Literal["left", "right"]
"""Side of a long text to truncate, as in transformers' `truncation_side`."""
_SHOWN_LETTERS = 60
"""How many letters of a text a message shows."""
_WORD_STARTS, _WORD_INSIDE = ("Ġ", "▁"), "##"
"""Marks on tokens at the start of a word, and on tokens inside one."""
_BATCH_TEXTS = 32
"""Texts tokenized at once, because the library needs 400 times their memory."""


class EncodedPair(NamedTuple):
    ids: np.ndarray
    """Token ids with special tokens, [tokens] int32."""
    second_start: int
    """Index of the second text's first token: the number of tokens with type 0."""
    is_truncated: bool
    """Whether tokens were removed to keep the length limit."""


class EncodedText(NamedTuple):
    """A text's tokens with their character offsets."""

    ids: np.ndarray
    """Token ids without special tokens, [tokens] int32."""
    offsets: np.ndarray
    """Each token's first character and end in the text, [tokens, 2]."""
    words: np.ndarray
    """Each token's word index, as the pre-tokenizer splits the text, [tokens]."""


class LoadedTokenizer:
    """A tokenizer loaded from a folder; encodes texts as token ids."""

    def __init__(
        self, folder: Path, *, ensure_end_token: bool = True, lowercase: bool = False
    ) -> None:
        """Load a tokenizer from a folder.

        With `ensure_end_token`, a text ends with the end or separator token even if the tokenizer
        itself adds none. With `lowercase`, text is converted to lower case before normalization.
        """
        self.folder = folder
        self._tokenizer = _load(folder)
        self._config = read_tokenizer_config(folder)
        check_added_tokens(self._tokenizer, self._config, folder)
        self.truncation_side = read_truncation_side(folder)
        if lowercase:
            normalizer = self._tokenizer.normalizer
            steps = [normalizers.Lowercase(), *([normalizer] if normalizer else [])]
            self._tokenizer.normalizer = normalizers.Sequence(steps)
        self.prefix, self.suffix = self._find_prefix_and_suffix(ensure_end_token=ensure_end_token)
        self.info = self._read_info(folder)
        added = self._tokenizer.get_added_tokens_decoder().values()
        self.special_tokens = tuple(token.content for token in added if token.special)

    def encode(
        self, texts: Sequence[str], *, parse_special_tokens: bool = False
    ) -> list[np.ndarray]:
        """Return each text's ids as int32, without added special tokens.

        With `parse_special_tokens`, a special token in a text becomes its id; otherwise it is plain
        text. Raises DataError if the tokenizer has neither a token for a text nor an unknown token.
        """
        bpe = None if parse_special_tokens else self._byte_level_bpe
        fast = [None if bpe is None else bpe.encode(text) for text in texts]
        rest = [text for text, ids in zip(texts, fast, strict=True) if ids is None]
        self._tokenizer.encode_special_tokens = not parse_special_tokens
        encoded = (
            np.array(encoding.ids, dtype=np.int32)
            for start in range(0, len(rest), _BATCH_TEXTS)
            for encoding in self._encode_batch(
                rest[start : start + _BATCH_TEXTS], add_special_tokens=False
            )
        )
        return [next(encoded) if ids is None else ids for ids in fast]

    def encode_with_offsets(
        self, texts: Sequence[str], *, parse_special_tokens: bool = False
    ) -> list[EncodedText]:
        """Return each text's tokens with their characters, without added special tokens.

        The ids are the same as from `encode`. Raises DataError as `encode` does.
        """
        self._tokenizer.encode_special_tokens = not parse_special_tokens
        encodings = self._encode_batch(texts, add_special_tokens=False, with_offsets=True)
        return [
            EncodedText(
                np.array(encoding.ids, np.int32),
                np.array(encoding.offsets, np.int64).reshape(-1, 2),
                np.array([-1 if word is None else word for word in encoding.word_ids], np.int64),
            )
            for encoding in encodings
        ]

    def encode_pairs(
        self,
        firsts: Sequence[str],
        seconds: Sequence[str],
        max_tokens: int,
        side: Side = "right",
        *,
        parse_special_tokens: bool = True,
    ) -> list[EncodedPair]:
        """Return text pairs as sequences, in the tokenizer's format.

        If a pair is longer than the limit, tokens are removed from one side of the longer text.
        """
        self._tokenizer.encode_special_tokens = not parse_special_tokens
        self._tokenizer.enable_truncation(max_tokens, strategy="longest_first", direction=side)
        try:
            encodings = self._encode_batch(list(zip(firsts, seconds, strict=True)))
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
        """Return the token types of a short text, or of a text pair."""
        texts = ("a",) if num_texts == 1 else ("a", "a")
        return list(self._tokenizer.encode(*texts).type_ids)

    def list_words(self) -> list[str]:
        """Return tokens with three or more letters, sorted."""
        token_ids = sorted(set(self._tokenizer.get_vocab().values()))
        tokens = (self._tokenizer.decode([token_id]).strip() for token_id in token_ids)
        return sorted({token for token in tokens if len(token) >= MIN_LETTERS and token.isalpha()})

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids, by default without special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return max(self._tokenizer.get_vocab().values()) + 1

    @cached_property
    def longest_token(self) -> int:
        """Number of characters of the longest token, as the vocabulary writes it."""
        return max(map(len, self._tokenizer.get_vocab()))

    @cached_property
    def byte_token(self) -> int | None:
        """The byte fallback token of 0xFF, which is in no character; None without byte fallback."""
        token: int | None = self._tokenizer.token_to_id("<0xFF>")
        return token if token is not None and self.decode([token]) == "\ufffd" else None

    def token_text(self, token_id: int) -> str:
        """Return a token as the vocabulary writes it; empty for an unknown id."""
        return self._tokenizer.id_to_token(token_id) or ""

    def drop_partial_word(self, ids: np.ndarray) -> np.ndarray:
        """Drop the word at the start of a chunk that the previous chunk has begun.

        The special tokens before the text stay. Words are known by byte-level, Metaspace and
        WordPiece marks; other tokens count as words.
        """
        has_prefix = ids[: len(self.prefix)].tolist() == self.prefix.tolist()
        start = len(self.prefix) if has_prefix else 0
        tokens = [self._tokenizer.id_to_token(token_id) or "" for token_id in ids[start:].tolist()]
        at_start = any(token.startswith(_WORD_STARTS) for token in tokens)
        mark = _WORD_STARTS if at_start else _WORD_INSIDE
        is_inner = [token.startswith(mark) != at_start for token in tokens]
        num_inner = is_inner.index(False) if False in is_inner else 0
        return np.concatenate([ids[:start], ids[start + num_inner :]])

    def truncate(self, ids: np.ndarray, max_tokens: int) -> np.ndarray:
        """Return at most `max_tokens` of a text's ids, truncated on the tokenizer's side."""
        return truncate_ids(ids, max_tokens, self.truncation_side)

    def add_prefix(self, ids: np.ndarray) -> np.ndarray:
        """Prepend the special tokens before a text, for a model to continue."""
        return np.concatenate([self.prefix, ids])

    def add_special_tokens(self, ids: np.ndarray) -> np.ndarray:
        """Add the special tokens before and after a text."""
        return np.concatenate([self.prefix, ids, self.suffix])

    @property
    def splits_special_tokens(self) -> bool:
        """Whether the tokenizer declares special tokens in texts plain text."""
        return bool(self._config.get("split_special_tokens"))

    @property
    def omits_unknown_characters(self) -> bool:
        """Whether the tokenizer silently leaves out characters missing from the vocabulary."""
        document = json.loads(self._tokenizer.to_str())
        model = document["model"]
        if model["type"] != "BPE" or model.get("unk_token") or model.get("byte_fallback"):
            return False
        return '"ByteLevel"' not in json.dumps([document["pre_tokenizer"], document["normalizer"]])

    def check_guessed(self, origin: Path, remedy: str) -> None:
        """Raise DataError if an older version guessed other special tokens for `origin`.

        It took them from the encoded letter "a". Without a token for it, it put all of them at the
        end.
        """
        if len(self.prefix) and not len(self.encode(["a"])[0]):
            problem = f"an older version put the special tokens of {origin} at the end of texts"
            raise DataError(problem, remedy)

    def describe(self) -> dict[str, Any]:
        """Return everything with an effect on a text's token ids, special tokens included."""
        document: dict[str, Any] = json.loads(self._tokenizer.to_str())
        special_tokens = {"prefix": self.prefix.tolist(), "suffix": self.suffix.tolist()}
        return {**document, "post_processor": special_tokens}

    @property
    def eos_token_id(self) -> int | None:
        """Declared end token id, if any."""
        return self._find_id("eos")

    @property
    def num_special_tokens(self) -> int:
        """How many special tokens enclose a text."""
        return len(self.prefix) + len(self.suffix)

    @cached_property
    def _byte_level_bpe(self) -> ByteLevelBpe | None:
        """The fast encoder, built on first use, which reads the whole tokenizer."""
        return build_byte_level_bpe(self._tokenizer)

    def _encode_batch(
        self,
        texts: Sequence[Any],
        *,
        add_special_tokens: bool = True,
        with_offsets: bool = False,
    ) -> Any:
        """Encode texts or pairs; raises DataError for an unknown character."""
        encoder = self._tokenizer
        encode_batch = encoder.encode_batch if with_offsets else encoder.encode_batch_fast
        try:
            return encode_batch(texts, add_special_tokens=add_special_tokens)
        except Exception as error:  # the library raises Exception itself
            if type(error) is not Exception:
                raise
            text = next(filter(self._is_unencodable, texts))
            problem = f"the tokenizer cannot encode {str(text)[:_SHOWN_LETTERS]!r}"
            remedy = "set model.unk_token in its tokenizer.json to a token of the vocabulary"
            raise DataError(f"{problem}: {first_line(error)}", remedy) from None

    def _is_unencodable(self, text: Any) -> bool:
        try:
            self._tokenizer.encode_batch_fast([text])
        except Exception:  # noqa: BLE001 (the library raises Exception itself)
            return True
        return False

    def _find_id(self, *roles: str) -> int | None:
        return read_role_id(self._tokenizer, self._config, *roles)

    def _find_prefix_and_suffix(self, *, ensure_end_token: bool) -> tuple[np.ndarray, np.ndarray]:
        prefix, suffix = read_special_tokens(self._tokenizer, self.folder)
        if ensure_end_token and not suffix and (end_id := self._find_id("sep", "eos")) is not None:
            suffix = (end_id,)
        return np.array(prefix, dtype=np.int32), np.array(suffix, dtype=np.int32)

    def _read_info(self, folder: Path) -> TokenizerInfo:
        added = self._tokenizer.get_added_tokens_decoder()
        special_ids = {token_id for token_id, token in added.items() if token.special}
        special_ids |= {role_id for role in ROLES if (role_id := self._find_id(role)) is not None}
        pad_id = self._find_id("pad", "unk", "eos", "bos", "cls", "sep")
        return TokenizerInfo(
            sha256=sha256(folder / TOKENIZER),
            vocab_size=max(self._tokenizer.get_vocab().values()) + 1,
            pad_token_id=0 if pad_id is None else pad_id,
            mask_token_id=self._find_id("mask"),
            sep_token_id=self._find_id("sep", "eos"),
            special_token_ids=tuple(sorted(special_ids)),
            truncation_side=self.truncation_side,
        )


def find_first_tokens(words: Sequence[str], offsets: np.ndarray) -> list[int | None]:
    """Return the index of each word's first token; None for a word without tokens.

    `offsets`, [tokens, 2], are for the words joined by spaces. A token that begins with a space, or
    is one, belongs to the word after the space.
    """
    ends = np.cumsum([len(word) + 1 for word in words]) - 1
    last_characters = np.maximum(offsets[:, 1] - 1, offsets[:, 0])
    words_of_tokens = np.searchsorted(ends, last_characters, side="right")
    first_tokens: list[int | None] = [None] * len(words)
    for token, word in reversed(list(enumerate(words_of_tokens.tolist()))):
        if word < len(words):
            first_tokens[word] = token
    return first_tokens


def train_tokenizer(texts: Iterator[list[str]], settings: TokenizerSettings, folder: Path) -> None:
    """Train a byte-level BPE on text batches and save it to a folder."""
    tokenizer = Tokenizer(models.BPE(unk_token=TRAINED_ROLES["unk"]))
    tokenizer.normalizer = _build_normalizer(settings.normalize)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=settings.vocab_size,
        min_frequency=settings.min_frequency,
        special_tokens=list(TRAINED_ROLES.values()),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    special_tokens = [
        (TRAINED_ROLES[role], tokenizer.token_to_id(TRAINED_ROLES[role])) for role in ("cls", "sep")
    ]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=special_tokens
    )
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / TOKENIZER))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": int(1e30),  # transformers' value for no maximum
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,
        **{f"{role}_token": token for role, token in TRAINED_ROLES.items()},
        "bos_token": TRAINED_ROLES["cls"],
        "eos_token": TRAINED_ROLES["sep"],
    }
    write_document(folder / CONFIG, config)


def truncate_ids(ids: np.ndarray, max_tokens: int, side: Side) -> np.ndarray:
    """Return a text's last tokens if the left side is truncated, else the first ones."""
    return ids[max(len(ids) - max_tokens, 0) :] if side == "left" else ids[:max_tokens]


def read_truncation_side(folder: Path) -> Side:
    """Return a folder's tokenizer truncation side, as transformers reads it.

    Raises DataError if the folder names another side.
    """
    side = read_declared_config(folder).get("truncation_side")
    if side is None:
        document = find_json(folder / TOKENIZER, "replace it") or {}
        side = (document.get("truncation") or {}).get("direction")
    side = str(side or "right").lower()
    if side not in ("left", "right"):
        problem = f"{folder / CONFIG} has truncation_side = '{side}'"
        raise DataError(problem, 'set it to "left" or "right"')
    return cast("Side", side)


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy tokenizer files; transformers converts the tokenizer if `tokenizer.json` is missing."""
    check_tokenizer(source)
    folder.mkdir(parents=True)
    if (source / TOKENIZER).exists():
        copy_tokenizer_files(source, folder)
        return
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(str(source)).save_pretrained(str(folder))


def copy_tokenizer_files(source: Path, folder: Path) -> None:
    """Copy tokenizer files to an existing folder.

    The copy names the special tokens that the source leaves to the model class.
    """
    for path in list_tokenizer_files(source):
        target = folder / path.relative_to(source)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, target)
    config = read_declared_config(source)
    if roles := read_class_roles(source, config):
        write_document(folder / CONFIG, {**config, **roles})


def check_tokenizer(source: Path) -> None:
    """Raise DataError if a folder lacks a tokenizer."""
    if not source.is_dir():
        raise DataError(f"no tokenizer folder {source}", "correct tokenizer.path")
    if not any(
        (source / name).exists() for name in (TOKENIZER, CONFIG, "vocab.txt", "tokenizer.model")
    ):
        raise DataError(
            f"{source} has no tokenizer", "set tokenizer.path to a folder with a tokenizer.json"
        )


def check_same_tokenizer(dataset: Path, model: Path) -> None:
    """Raise DataError if a model folder's tokenizer is not a prepared dataset's.

    Ignores the truncation and padding last stored in the file by a library. Post-processors are
    compared by the special tokens around a text: a model's file may state the end token added in
    the dataset.
    """
    dataset_file, model_file = dataset / "tokenizer" / TOKENIZER, model / TOKENIZER
    if not (dataset_file.exists() and model_file.exists()):
        return
    if sha256(dataset_file) == sha256(model_file):
        return
    if LoadedTokenizer(dataset_file.parent).describe() != LoadedTokenizer(model).describe():
        raise DataError(
            f"{model} was trained with another tokenizer than {dataset} was prepared with",
            f'prepare the data with tokenizer.path = "{model}"',
        )


def hash_tokenizer(source: Path) -> str:
    """Hash a folder's tokenizer files; raises DataError if there are none."""
    check_tokenizer(source)
    names = (path.relative_to(source).as_posix() for path in list_tokenizer_files(source))
    lines = "".join(f"{name} {sha256(source / name)}\n" for name in names)
    return hashlib.sha256(lines.encode()).hexdigest()


def list_tokenizer_files(source: Path) -> list[Path]:
    """Return a folder's tokenizer files, sorted."""
    paths = (path for pattern in _FILE_PATTERNS for path in source.glob(pattern))
    return sorted(
        path for path in paths if path.relative_to(source).as_posix().startswith(_FILE_PREFIXES)
    )


def _load(folder: Path) -> Tokenizer:
    check_file(folder / TOKENIZER, "replace it")
    try:
        tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
    except Exception as error:  # noqa: BLE001 (the library raises Exception itself)
        raise DataError(f"{folder / TOKENIZER} cannot be read: {error}", "replace it") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    if not tokenizer.get_vocab_size():
        raise DataError(f"{folder / TOKENIZER} has no tokens", "replace it")
    return tokenizer


def _build_normalizer(kind: str) -> normalizers.Normalizer | None:
    if kind == "lowercase":
        return normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    return normalizers.NFC() if kind == "nfc" else None
