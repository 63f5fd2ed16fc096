"""Converts records to program inputs: adds prompts, tokenizes, truncates."""

from __future__ import annotations

import copy
from functools import cached_property, partial
from itertools import takewhile
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import regex

from regauge.data import chat_templates
from regauge.data.columns import encode_value, find_embedding_rows
from regauge.data.conversations import check_strings, format_part, parse_request
from regauge.data.tokenizer import EncodedText, LoadedTokenizer, find_first_tokens, truncate_ids
from regauge.inference.export.records import TextRecords, TokenizedTexts
from regauge.inference.export.text_stream import AnswerText
from regauge.system.errors import DataError
from regauge.system.log import logger

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from regauge.data.conversations import Conversation
    from regauge.data.values import Value
    from regauge.inference.export.artifact import Artifact
    from regauge.models.io_spec import InputSpec
    from regauge.models.sentence_transformers import Tokenization
    from regauge.models.settings import Generation

MAX_CHECKED_CONVERSATIONS = 100
"""How many conversations to search for ignored parts."""
MIN_TOKEN_CHARACTERS = 64
"""Fewest characters per token at which a text counts as too long without tokenizing it; usual texts
have 3 to 6, and spaces may vanish."""
Ids = list[np.ndarray]
Flags = list[bool]
_CHARACTER = regex.compile(r"\X")
NO_VALUES: Mapping[str, Sequence[Value | None]] = MappingProxyType({})


class TextWords(NamedTuple):
    """The words of a text within the model's limit, in order."""

    text: str
    positions: np.ndarray
    """Index of each word's first token in the model input, [words]."""
    spans: np.ndarray
    """Each word's first character and end, [words, 2]."""


class EncodedRecords(NamedTuple):
    records: TextRecords
    num_truncated: int
    """How many texts were longer than the model reads."""
    is_truncated: np.ndarray
    """Whether one of a record's texts was longer than the model reads, [records] bool."""


class Preprocessor:
    """A tokenizer with a program's prompts and length limits."""

    def __init__(self, folder: Path, tokenization: Tokenization, input_spec: InputSpec) -> None:
        self._is_transformers = tokenization.convention == "transformers"
        self._tokenizer = LoadedTokenizer(
            folder,
            ensure_end_token=not self._is_transformers,
            lowercase=tokenization.lowercase,
        )
        is_older = tokenization.special_tokens == "guessed"
        if is_older:
            self._tokenizer.check_guessed(folder, "export the model again")
        self._parses_special_tokens = self._is_transformers and (
            is_older or not self._tokenizer.splits_special_tokens
        )
        self._tokenization = tokenization
        self._input_spec = input_spec
        self._folder = folder
        self._num_checked = 0
        self._ignored_parts: set[str] = set()

    @property
    def max_length(self) -> int:
        """Maximum tokens per text."""
        return self._tokenization.max_length

    @cached_property
    def _token_characters(self) -> int:
        return max(MIN_TOKEN_CHARACTERS, self._tokenizer.longest_token)

    @property
    def max_characters(self) -> int:
        """Maximum characters per text; a longer one exceeds the model's limit in tokens."""
        return self.max_length * self._token_characters

    def cut(self, text: str) -> str:
        """Return at most `max_characters` of a text, truncated on the model's side."""
        if len(text) <= self.max_characters:
            return text
        is_right = self._tokenization.truncation_side == "right"
        return text[: self.max_characters] if is_right else text[-self.max_characters :]

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return self._tokenizer.vocab_size

    @property
    def is_chat(self) -> bool:
        """Whether a text is a conversation message, in a chat template."""
        return self._tokenization.input_format == "chat"

    @property
    def is_stable(self) -> bool:
        """Whether a text always gives the same tokens; a chat template may write the date."""
        return not self.is_chat or not self._template.unstable_names

    def with_tokenization(self, tokenization: Tokenization | None) -> Preprocessor:
        """Return a preprocessor with the same tokenizer and other limits."""
        changed = copy.copy(self)
        changed._tokenization = tokenization or self._tokenization  # noqa: SLF001 - its own class
        return changed

    def encode_records(
        self,
        columns: Sequence[Sequence[str]],
        prompt: str | None = None,
        values: Mapping[str, Sequence[Value | None]] = NO_VALUES,
    ) -> EncodedRecords:
        """Tokenize records, given one column for each text field.

        `prompt` names the prompt to prepend to each text, by default the model's own. `values` are
        the ranking candidates' numeric and categorical features, by field name; an absent field
        has missing values.
        """
        prefix = self._tokenization.prompt_text(prompt)
        if self._input_spec.is_pair and self._is_transformers:
            firsts, seconds = columns  # as in sentence-transformers, only the first has the prompt
            return self._encode_pairs([prefix + text for text in firsts], seconds)
        max_tokens = self._tokenization.max_length
        limits = self._input_spec.max_lengths or (max_tokens,) * len(columns)
        limits = tuple(min(limit, max_tokens) for limit in limits)
        encoded = [
            self._encode_texts(texts, limit, prefix)
            for texts, limit in zip(columns, limits, strict=True)
        ]
        truncated = np.array([flags for _, flags in encoded], bool)
        lists = [ids for ids, _ in encoded]
        if not self._input_spec.is_pair:
            features = self._build_features(values, len(lists[0]))
            records = TextRecords(list(map(TokenizedTexts.from_lists, lists)), features)
            return _summarize_truncation(records, truncated)
        first_texts = lists[0]
        joined = [self._join(first, second) for first, second in zip(*lists, strict=True)]
        is_joined_truncated = np.array([len(ids) > max_tokens for ids in joined], bool)
        pairs = list(map(self._truncate, joined, map(len, first_texts)))
        joined = [ids for ids, _ in pairs]
        starts = np.fromiter((start for _, start in pairs), np.int32, len(pairs))
        records = TextRecords([TokenizedTexts.from_lists(joined)], [starts])
        return _summarize_truncation(records, np.vstack([truncated, is_joined_truncated]))

    def encode_windows(
        self, texts: Sequence[str], prompt: str | None = None
    ) -> tuple[TextRecords, np.ndarray]:
        """Split texts into windows within the model's limit; also return each window's text.

        A text is split into consecutive windows of as many tokens as the model reads, each with the
        special tokens. The prompt begins the first window. The second value is [windows] int64.
        """
        prefix = self._tokenization.prompt_text(prompt)
        encoded = self._tokenizer.encode(
            [prefix + text for text in texts], parse_special_tokens=self._parses_special_tokens
        )
        room = self._max_text_length - self._tokenizer.num_special_tokens
        windows = [
            (index, ids[start : start + room])
            for index, ids in enumerate(encoded)
            for start in range(0, max(1, len(ids)), room)
        ]
        lists = [self._tokenizer.add_special_tokens(ids) for _, ids in windows]
        owners = np.array([index for index, _ in windows], np.int64)
        return TextRecords.from_lists(lists), owners

    def encode_ids(self, lists: Sequence[np.ndarray]) -> EncodedRecords:
        """Return texts tokenized elsewhere, adding special tokens where missing."""
        prefix, suffix = self._tokenizer.prefix, self._tokenizer.suffix
        limit = self._max_text_length
        room = limit - self._tokenizer.num_special_tokens
        side = self._tokenization.truncation_side
        completed, flags = [], []
        for ids in lists:
            content = ids
            has_prefix = len(prefix) and np.array_equal(ids[: len(prefix)], prefix)
            has_suffix = len(suffix) and np.array_equal(ids[-len(suffix) :], suffix)
            if has_prefix or (has_suffix and not len(prefix)):
                content = ids[len(prefix) : len(ids) - len(suffix) if has_suffix else None]
            flags.append(len(content) > room)
            content = truncate_ids(content, room, side)
            completed.append(self._tokenizer.add_special_tokens(content).astype(np.int32))
        return _summarize_truncation(TextRecords.from_lists(completed), np.array([flags], bool))

    @property
    def _max_text_length(self) -> int:
        """Maximum tokens in a record's only text."""
        return min((self._tokenization.max_length, *self._input_spec.max_lengths))

    def describe_tokens(
        self, texts: Sequence[str], prompt: str | None = None, *, add_special_tokens: bool = True
    ) -> list[list[dict[str, Any]]]:
        """Return whole texts' tokens: `id`, `text`, `special`, `start` and `stop`.

        `start` and `stop` are character positions in the text after its prompt is added; special
        tokens have none.
        """
        prefix = self._tokenization.prompt_text(prompt)
        encoded = self._tokenizer.encode_with_offsets(
            [prefix + text for text in texts], parse_special_tokens=self._parses_special_tokens
        )
        rows = []
        for text, tokens in zip(texts, encoded, strict=True):
            row = [
                {
                    "id": int(token_id),
                    "text": (prefix + text)[start:stop],
                    "special": False,
                    "start": int(start),
                    "stop": int(stop),
                }
                for token_id, (start, stop) in zip(tokens.ids, tokens.offsets, strict=True)
            ]
            if add_special_tokens:
                before, after = (
                    [self._describe_special_token(int(token_id)) for token_id in ids]
                    for ids in (self._tokenizer.prefix, self._tokenizer.suffix)
                )
                row = [*before, *row, *after]
            rows.append(row)
        return rows

    def _describe_special_token(self, token_id: int) -> dict[str, Any]:
        text = self._tokenizer.token_text(token_id)
        return {"id": token_id, "text": text, "special": True, "start": None, "stop": None}

    def find_words(
        self, texts: Sequence[str], prompt: str | None, word_lists: Sequence[Sequence[str]] = ()
    ) -> list[TextWords]:
        """Return the words in each text, as the model's pre-tokenizer splits it.

        `prompt` is that of `encode_records`: it moves the tokens, but not the characters. A
        non-empty list in `word_lists` has a text's words, which the text joins by spaces. Leaves
        out words after the model's length limit.
        """
        prefix, side = self._tokenization.prompt_text(prompt), self._tokenization.truncation_side
        room = self._max_text_length - self._tokenizer.num_special_tokens
        parts = list(map(self.cut, texts))
        encoded = self._tokenizer.encode_with_offsets(
            [prefix + part for part in parts], parse_special_tokens=self._parses_special_tokens
        )
        words = []
        lists = word_lists or [()] * len(texts)
        for text, part, tokens, given in zip(texts, parts, encoded, lists, strict=True):
            positions = np.full(len(tokens.ids), -1)
            kept = truncate_ids(np.arange(len(positions)), room, side)
            positions[kept] = len(self._tokenizer.prefix) + np.arange(len(kept))
            moved = tokens.offsets - len(prefix) + (len(text) - len(part)) * (side == "left")
            # The last space of a prompt belongs to the first word, as any other space.
            end = len(prefix.rstrip())
            first = int((tokens.offsets[:, 1] <= end).sum()) if end else 0
            shown = EncodedText(tokens.ids[first:], moved[first:], tokens.words[first:])
            find = partial(_place_words, given) if given else _locate_words
            words.append(find(text, shown, positions[first:]))
        return words

    def _build_features(
        self, values: Mapping[str, Sequence[Value | None]], count: int
    ) -> list[np.ndarray]:
        """Return numbers, [records, numbers] fp32, and embedding rows, [records, categories]."""
        ranking = self._input_spec.ranking
        if ranking is None:
            return []
        numbers = np.full(
            (count, max(1, len(self._input_spec.numeric_features))), np.nan, np.float32
        )
        for index, name in enumerate(self._input_spec.numeric_features):
            if name in values:
                numbers[:, index] = [encode_value(value, "float") for value in values[name]]
        hashes = np.full((count, max(1, len(self._input_spec.categorical_features))), -1, np.int64)
        for index, name in enumerate(self._input_spec.categorical_features):
            if name in values:
                hashes[:, index] = [encode_value(value, "category") for value in values[name]]
        return [numbers, find_embedding_rows(hashes, ranking.interactions.buckets)]

    def _encode_texts(self, texts: Sequence[str], limit: int, prefix: str) -> tuple[Ids, Flags]:
        """Return texts' ids with special tokens, and whether they were truncated."""
        prompted = [prefix + text for text in texts] if prefix else list(texts)
        if self._tokenization.input_format != "text":
            return self._encode_prompts(prompted, limit)
        encoded = self._tokenizer.encode(prompted, parse_special_tokens=self._parses_special_tokens)
        room = limit - self._tokenizer.num_special_tokens
        truncated = [len(ids) > room for ids in encoded]
        side = self._tokenization.truncation_side
        encoded = [truncate_ids(ids, room, side) for ids in encoded]
        return [self._tokenizer.add_special_tokens(ids) for ids in encoded], truncated

    def _encode_prompts(self, texts: Sequence[str], limit: int) -> tuple[Ids, Flags]:
        """Return generation prompts' ids; a long prompt is truncated at the start."""
        if self.is_chat:
            try:
                requests = [self._template.render_prompt(text) for text in texts]
            except chat_templates.TemplateError as error:
                problem = f"the chat template of the model cannot render a text: {error}"
                raise DataError(problem, "correct the template, and export again") from None
            return self._encode_requests(requests, limit)
        encoded = self._tokenizer.encode(texts, parse_special_tokens=self._parses_special_tokens)
        add_special_tokens, num_special_tokens = (
            (self._tokenizer.add_special_tokens, self._tokenizer.num_special_tokens)
            if self._is_transformers
            else (self._tokenizer.add_prefix, len(self._tokenizer.prefix))
        )
        room = limit - num_special_tokens
        prompts = [add_special_tokens(ids[-room:]) for ids in encoded]
        return prompts, [len(ids) > room for ids in encoded]

    def _encode_requests(self, requests: Sequence[str], limit: int) -> tuple[Ids, Flags]:
        """Return rendered conversations' ids; a long one is truncated at the start."""
        encoded = self._tokenizer.encode(list(requests), parse_special_tokens=True)
        return [ids[-limit:] for ids in encoded], [len(ids) > limit for ids in encoded]

    def render_request(self, record: Mapping[str, Value]) -> str:
        """Render a record's conversation up to its answer, as the model reads it.

        Raises ConversationError if the record has none, and TemplateError if the chat template
        cannot render it.
        """
        conversation = parse_request(record, self._template.literals)
        check_strings(conversation, self._tokenizer.special_tokens)
        request = self._template.render_request(conversation)
        self._warn_if_ignored(conversation)
        return request

    def _warn_if_ignored(self, conversation: Conversation) -> None:
        """Log parts of the first conversations left out by the chat template."""
        if self._num_checked >= MAX_CHECKED_CONVERSATIONS:
            return
        self._num_checked += 1
        for name in map(format_part, self._template.list_ignored_parts(conversation)):
            if name not in self._ignored_parts:
                self._ignored_parts.add(name)
                logger.warning("The chat template of the model ignores '%s'", name)

    def encode_requests(self, requests: Sequence[str]) -> EncodedRecords:
        """Tokenize conversations rendered by `render_request`."""
        ids, truncated = self._encode_requests(requests, self._tokenization.max_length)
        return _summarize_truncation(TextRecords.from_lists(ids), np.array([truncated], bool))

    @cached_property
    def _template(self) -> chat_templates.ChatTemplate:
        return chat_templates.load_template(self._folder, None)

    def decode(self, ids: np.ndarray) -> list[str]:
        """Return the texts of generated tokens, [records, tokens]; negative ids are padding."""
        return [self.decode_ids(row[row >= 0].astype(int).tolist()) for row in ids]

    def decode_ids(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of tokens, by default without special tokens."""
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def build_answer(self, generation: Generation) -> AnswerText:
        """Return an empty answer that decodes its tokens as they come."""
        return AnswerText(self.decode_ids, generation, self._tokenizer.byte_token)

    def _encode_pairs(self, firsts: Sequence[str], seconds: Sequence[str]) -> EncodedRecords:
        pairs = self._tokenizer.encode_pairs(
            firsts,
            seconds,
            self._tokenization.max_length,
            self._tokenization.truncation_side,
            parse_special_tokens=self._parses_special_tokens,
        )
        starts = np.fromiter((pair.second_start for pair in pairs), np.int32, len(pairs))
        records = TextRecords([TokenizedTexts.from_lists([pair.ids for pair in pairs])], [starts])
        return _summarize_truncation(records, np.array([[pair.is_truncated for pair in pairs]]))

    def _truncate(self, ids: np.ndarray, start: int) -> tuple[np.ndarray, int]:
        """Return as many of a pair's ids as the model reads, and where the second text starts.

        The special tokens at the untruncated end stay.
        """
        limit, prefix, suffix = (
            self._tokenization.max_length,
            self._tokenizer.prefix,
            self._tokenizer.suffix,
        )
        if len(ids) <= limit:
            return ids, start
        if self._tokenization.truncation_side == "right":
            return np.concatenate([ids[: limit - len(suffix)], suffix]), start
        rest = ids[len(ids) - limit + len(prefix) :]
        start -= len(ids) - limit
        return np.concatenate([prefix, rest]), max(start, len(prefix))

    def _join(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        """Return two texts as one, without the special tokens at the start of the second."""
        return np.concatenate([first, second[len(self._tokenizer.prefix) :]])


def build_preprocessor(artifact: Artifact) -> Preprocessor | None:
    """Return an artifact's preprocessor; None if the program reads tensors."""
    program = artifact.program
    if program.tokenization is None:
        return None
    return Preprocessor(artifact.tokenizer_folder, program.tokenization, program.fields)


def _summarize_truncation(records: TextRecords, flags: np.ndarray) -> EncodedRecords:
    """Return encoded records; `flags`, [texts, records] bool, are per text field."""
    is_truncated: np.ndarray = np.any(flags, axis=0)
    return EncodedRecords(records, int(flags.sum()), is_truncated)


def _place_words(
    words: Sequence[str], text: str, tokens: EncodedText, positions: np.ndarray
) -> TextWords:
    """Return given words with a token that the model reads, as training places their tags.

    `positions` are those of the tokens in the model input, [tokens]; -1 for a truncated token.
    """
    firsts = find_first_tokens(words, tokens.offsets)
    lengths = np.array([len(word) for word in words])
    stops = np.cumsum(lengths + 1) - 1
    pairs = [
        (number, positions[token])
        for number, token in enumerate(firsts)
        if token is not None and positions[token] >= 0
    ]
    numbers, indices = np.array(pairs, np.int64).reshape(-1, 2).T
    return TextWords(text, indices, np.stack([stops - lengths, stops], axis=1)[numbers])


def _locate_words(text: str, tokens: EncodedText, positions: np.ndarray) -> TextWords:
    """Return the words that the model reads, as spans of whole characters.

    A normalizer that composes characters or strips accents leaves the marks out of the offsets.
    """
    indices = np.flatnonzero(positions >= 0)
    words, offsets = tokens.words[indices], tokens.offsets[indices]
    is_first = np.diff(words, prepend=-1) != 0
    starts = np.flatnonzero(is_first & (words >= 0))
    stops = np.append(starts, len(words))[1:]
    spans, end = np.empty((len(starts), 2), np.int64), 0
    for row, start, stop in zip(spans, starts.tolist(), stops.tolist(), strict=True):
        first = max(end, int(offsets[start, 0]))  # a mark split off belongs to the word before
        row[:] = _strip_span(text, first, int(offsets[start:stop, 1].max()))
        row[1] = end = _complete_character(text, *row.tolist())
    is_filled = spans[:, 0] < spans[:, 1]  # a pre-tokenizer may split off spaces
    return TextWords(text, positions[indices][starts][is_filled], spans[is_filled])


def _complete_character(text: str, start: int, end: int) -> int:
    """Return where the last character of a span ends, with its combining marks.

    A character is an extended grapheme cluster (Unicode Standard Annex 29).
    """
    if end == len(text) or text[end].isascii():
        return end
    clusters = takewhile(lambda cluster: cluster.start() < end, _CHARACTER.finditer(text, start))
    return max((cluster.end() for cluster in clusters), default=end)


def _strip_span(text: str, start: int, end: int) -> tuple[int, int]:
    content = text[start:end]
    start += len(content) - len(content.lstrip())
    return start, start + len(content.strip())
