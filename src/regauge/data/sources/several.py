"""Several sources as one, in their order: of each all records or a share, its fields renamed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import (
    Field,
    SerializeAsAny,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from regauge import choices
from regauge.config import Settings, chosen
from regauge.data import duplicates
from regauge.data.sources import Piece, Record, Rejected, Skipped, Source
from regauge.errors import RegaugeError, SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from regauge.data.sources import Found, Value

FOLDER = "data/sources"
OWN = ("share", "rename")


class Member(Settings):
    """One of several sources: its own keys, and these two."""

    source: Annotated[SerializeAsAny[Source], chosen(FOLDER)]
    """Where its records come from; in a run file its keys stand beside the others."""
    share: float = Field(default=1.0, gt=0.0, le=1.0)
    """Part of its records that is kept: a hash of their content says which."""
    rename: dict[str, str] = {}
    """New names of fields by their own, such as {body = "text"}."""

    @model_validator(mode="before")
    @classmethod
    def _apart(cls, value: Any) -> Any:
        """Take the keys of the source apart from the others."""
        if isinstance(value, str):
            return {"source": value}
        if not isinstance(value, dict) or "kind" not in value:
            return value
        known = (*choices.load(FOLDER, value["kind"]).model_fields, "kind", *OWN)
        for name in value:
            if name not in known:
                remedy = choices.did_you_mean(name, known)
                raise SettingsError(f"a source '{value['kind']}': unknown key '{name}'", remedy)
        own = {name: value[name] for name in OWN if name in value}
        return {**own, "source": {name: value[name] for name in value if name not in OWN}}

    @model_serializer(mode="wrap")
    def _beside(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        table = handler(self)
        keys = {name: key for name, key in table.pop("source").items() if name != "duplicates"}
        return {**keys, **table}

    @model_validator(mode="after")
    def _consistent(self) -> Member:
        if "duplicates" in self.source.model_fields_set:
            raise ValueError("'duplicates' is of all sources together: set source.duplicates")
        known = self.source.fields()
        for name in self.rename:
            if known and name not in known:
                problem = f"rename: the source has no field '{name}'"
                raise SettingsError(problem, choices.did_you_mean(name, known))
        if len({self.rename.get(name, name) for name in known}) < len(known):
            raise ValueError("rename gives two fields one name")
        return self

    def fields(self) -> tuple[str, ...]:
        """Return the names of the fields as they are here, or none."""
        return tuple(self.rename.get(name, name) for name in self.source.fields())


class Several(Source):
    """The records of several sources, one source after the other."""

    sources: tuple[Member, ...] = Field(min_length=1)
    """Tables as of `source` itself, each also with `share` and `rename`."""

    @model_validator(mode="after")
    def _flat(self) -> Several:
        if any(isinstance(member.source, Several) for member in self.sources):
            raise ValueError("one of several sources is not several again: name them all here")
        return self

    def elsewhere(self) -> str:
        """Return the first that is asked for."""
        return next(filter(None, (member.source.elsewhere() for member in self.sources)), "")

    def fields(self) -> tuple[str, ...]:
        """Return the fields of all sources, or none where one of them does not say."""
        known = [member.fields() for member in self.sources]
        return tuple(dict.fromkeys(sum(known, ()))) if all(known) else ()

    def kinds(self, piece: Piece) -> dict[str, str]:
        """Return what the piece's source does, by the names that fields have here."""
        member = self.sources[piece.source]
        found = member.source.kinds(piece)
        return {member.rename.get(name, name): kind for name, kind in found.items()}

    def pieces(self) -> tuple[Piece, ...]:
        """Return the pieces of all sources, each with the number of its source."""
        found: list[Piece] = []
        for number, member in enumerate(self.sources):
            try:
                pieces = member.source.pieces()
            except RegaugeError as error:
                raise error.within(f"source {number + 1}") from None
            for piece in pieces:
                name = f"source {number + 1}: {piece.name}"
                text_bytes = int(piece.text_bytes * member.share)
                found.append(piece._replace(name=name, text_bytes=text_bytes, source=number))
        return tuple(found)

    def read(self, piece: Piece) -> Iterator[Found]:
        """Yield what the piece's source does, of its share and with its fields renamed."""
        member = self.sources[piece.source]
        outside = f"outside of the share of source {piece.source + 1}"
        for found in member.source.read(piece):
            if not isinstance(found, Record):
                yield found
                continue
            renamed = _renamed(found, member.rename)
            if isinstance(renamed, Record) and not _within(found.fields, member.share):
                yield Skipped(outside, renamed.fields)
            else:
                yield renamed


def _within(fields: dict[str, Value], share: float) -> bool:
    if share == 1:
        return True
    try:
        content = duplicates.content_hash(duplicates.content(fields))
    except UnicodeEncodeError:  # no text, and rejected as such wherever it comes from
        return True
    return duplicates.keyed_share(content, 0, "share") < share


def _renamed(record: Record, names: dict[str, str]) -> Record | Rejected:
    if not names:
        return record
    fields = {names.get(name, name): value for name, value in record.fields.items()}
    if len(fields) < len(record.fields):
        twice = next(name for name in names if names[name] in record.fields)
        reason = f"'{twice}' cannot become '{names[twice]}', which is there"
        return Rejected(record.file, record.place, reason)
    return record._replace(fields=fields)
