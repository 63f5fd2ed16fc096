"""Rows of one length, filled with conversations in a chat template; their answers are marked."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa

from regauge.data import chat_templates, dataset
from regauge.data.columns import MARKS, Found
from regauge.data.dataset import TOKENIZER
from regauge.data.layouts import Unfit
from regauge.data.layouts._filled import Filled
from regauge.data.tokenizer import Encoder
from regauge.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from regauge.data.layouts import Encoded
    from regauge.data.settings import RowLayout, Tokenizer
    from regauge.data.sources import Value

ANSWERS = "answers"
WAYS = '"alpaca", "chatml" or a file of your own'


class Chat(Filled):
    """The tokens of a conversation are those of its template; none is added or written twice."""

    kind: ClassVar[str] = "chat"
    keys: ClassVar[tuple[str, ...]] = ("length", "too_long", "template")
    defaults: ClassVar[dict[str, Any]] = {"too_long": "truncate"}

    @classmethod
    def check(cls, settings: RowLayout) -> None:
        if settings.too_long == "split":
            raise ValueError("a conversation is not split: set too_long to truncate or reject")

    def reads(self) -> tuple[str, ...]:
        """Return nothing: a record has one set of fields or another."""
        return ()

    def check_fields(self, known: tuple[str, ...]) -> None:
        if "messages" not in known and not {"instruction", "output"} <= set(known):
            raise SettingsError(
                "the source has no field 'messages', and no 'instruction' with an 'output'",
                'for lists of messages set source.columns = ["messages"]',
            )

    def check_inputs(self, tokenizer: Tokenizer) -> None:
        given = Path(tokenizer.path) if tokenizer.path else None
        if self.settings.template is None and not (given and chat_templates.has_template(given)):
            owner = f"the tokenizer '{given}'" if given else "a trained tokenizer"
            raise SettingsError(f"{owner} has no chat template", f"set rows.template to {WAYS}")
        if given and (given / TOKENIZER).is_file():
            self.check_tokenizer(Encoder(given))

    def check_tokenizer(self, encoder: Encoder) -> None:
        """Raise SettingsError for a template that loses answers, or writes them without an end."""
        name = self.settings.template or "of the tokenizer"
        try:
            written = self._template(encoder).written(chat_templates.PROBE)
        except chat_templates.TemplateError as error:
            problem = f"the chat template {name} cannot be used: {error}"
            raise SettingsError(problem, f"set rows.template to {WAYS}") from None
        ids = self.encode(_parts(written), encoder)
        if not np.isin(ids[0][_marks(ids) > 0], encoder.facts.special).any():
            raise SettingsError(
                f"the chat template {name} ends no answer with a special token of the tokenizer,"
                " so that no model would learn to stop",
                'end them with {{ eos_token }} or the like, as rows.template = "alpaca" does',
            )

    def document(self) -> dict[str, Any]:
        if self.settings.template is None:
            return super().document()
        content = chat_templates.template_file(self.settings.template).read_bytes()
        return {**super().document(), "template_sha256": hashlib.sha256(content).hexdigest()}

    def finish(self, tokenizer: Path) -> None:
        """Make the template that of the dataset's tokenizer, and so of every model's."""
        if self.settings.template is not None:
            chat_templates.adopt(tokenizer, chat_templates.template_file(self.settings.template))

    def columns(self) -> list[pa.Field]:
        return [*super().columns(), pa.field(ANSWERS, MARKS)]

    def fields(self, found: dict[str, Found]) -> dict[str, dataset.Field]:
        answers = dataset.Field(limit=self.settings.length, kind="answers")
        return {**super().fields(found), ANSWERS: answers}

    def texts(self, record: dict[str, Value], encoder: Encoder) -> list[str]:
        """Return a conversation, and its beginnings up to where each answer begins and ends."""
        messages = chat_templates.conversation(record)
        if messages is None:
            wanted = "'messages' of role and content, or texts 'instruction' and 'output'"
            raise Unfit("no conversation", f"needs {wanted}")
        for message in messages:
            for token in encoder.special:
                if token in message["content"]:
                    raise Unfit("a special token in a message", token)
        try:
            written = self._template(encoder).written(messages)
        except chat_templates.TemplateError as error:
            raise Unfit("the chat template cannot write it", str(error)) from None
        if not written.answers:
            raise Unfit("no answer", bad=False)
        return _parts(written)

    def encode(self, texts: list[str], encoder: Encoder) -> list[np.ndarray]:
        return encoder.encode(texts, special=True)

    def rows(self, encoded: Encoded) -> Iterator[list[Any]]:
        """Yield the one chunk of a conversation; one that is cut loses its end."""
        tokens, marks, length = encoded.ids[0], _marks(encoded.ids), self.settings.length
        if len(tokens) > length and self.settings.too_long == "reject":
            raise Unfit(f"longer than {length} tokens", f"{len(tokens)} tokens")
        if not marks[:length].any():
            raise Unfit(f"no answer within {length} tokens", f"{len(tokens)} tokens")
        if len(tokens) > length:
            encoded.truncated["messages"] += 1
        yield [tokens[:length], marks[:length]]

    def _template(self, encoder: Encoder) -> chat_templates.Template:
        return chat_templates.template(encoder.folder, self.settings.template)


def _parts(written: chat_templates.Written) -> list[str]:
    """Return the text, and its beginnings up to both ends of each answer."""
    return [written.text, *(written.text[:at] for pair in written.answers for at in pair)]


def _marks(ids: list[np.ndarray]) -> np.ndarray:
    """Return 1 for each token of an answer, 0 for others; `ids` are those of `_parts`.

    An answer begins with the first token that its prompt alone does not have, so that a prompt has
    the same tokens in training and where it is answered.
    """
    whole, *cuts = ids
    marks = np.zeros(len(whole), np.uint8)
    for begin, end in zip(cuts[::2], cuts[1::2], strict=True):
        marks[_shared(begin, whole) : _shared(end, whole)] = 1
    return marks


def _shared(beginning: np.ndarray, whole: np.ndarray) -> int:
    """Return how many tokens two texts have in common from the start on."""
    size = min(len(beginning), len(whole))
    differ = np.flatnonzero(beginning[:size] != whole[:size])
    return int(differ[0]) if len(differ) else size
