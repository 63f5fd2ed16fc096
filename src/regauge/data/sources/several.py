"""Several sources as one: all or a fraction of the records of each, with renamed fields."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import (
    Field,
    SerializeAsAny,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from regauge.config import Settings, choice_of
from regauge.data import duplicates
from regauge.data.sources import Piece, Record, Rejected, Skipped, Source
from regauge.system import choices
from regauge.system.errors import RegaugeError, SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from regauge.data.sources import SourceItem
    from regauge.data.values import FieldKind, Value

FOLDER = "data/sources"
ENTRY_KEYS = ("fraction", "rename")
"""The keys of an entry that are not keys of its source."""


class SourceEntry(Settings):
    """One of several sources: the keys of the source, `fraction` and `rename`."""

    source: Annotated[SerializeAsAny[Source], choice_of(FOLDER)]
    """The source; in a run file its keys are in the same table as the other keys."""
    fraction: float = Field(default=1.0, gt=0.0, le=1.0)
    """Fraction of the records to use; a hash of all their fields selects them."""
    rename: dict[str, str] = {}
    """New names of fields by their names in the source, such as {body = "text"}."""

    @model_validator(mode="before")
    @classmethod
    def _separate_source_keys(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"source": value}
        if not isinstance(value, dict) or "kind" not in value:
            return value
        known = (*choices.load(FOLDER, value["kind"]).model_fields, "kind", *ENTRY_KEYS)
        for name in value:
            if name not in known:
                remedy = choices.did_you_mean(name, known)
                raise SettingsError(f"a source '{value['kind']}': unknown key '{name}'", remedy)
        entry = {name: value[name] for name in ENTRY_KEYS if name in value}
        return {**entry, "source": {name: value[name] for name in value if name not in ENTRY_KEYS}}

    @model_serializer(mode="wrap")
    def _merge_source_keys(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        table = handler(self)
        keys = {name: key for name, key in table.pop("source").items() if name != "duplicates"}
        return {**keys, **table}

    @model_validator(mode="after")
    def _check_names(self) -> SourceEntry:
        if "duplicates" in self.source.model_fields_set:
            raise ValueError("'duplicates' applies to all sources; set source.duplicates instead")
        known = self.source.field_names()
        for name in self.rename:
            if known and name not in known:
                problem = f"rename: the source has no field '{name}'"
                raise SettingsError(problem, choices.did_you_mean(name, known))
        if len({self.rename.get(name, name) for name in known}) < len(known):
            raise ValueError("rename gives two fields the same name; choose distinct names")
        return self

    def field_names(self) -> tuple[str, ...]:
        """Return the names of the fields after renaming, if known."""
        return tuple(self.rename.get(name, name) for name in self.source.field_names())


class SeveralSources(Source):
    """The records of several sources, one source after the other."""

    sources: tuple[SourceEntry, ...] = Field(min_length=1)
    """Tables like `source` itself, each also with `fraction` and `rename`."""

    @model_validator(mode="after")
    def _check_nesting(self) -> SeveralSources:
        if any(isinstance(entry.source, SeveralSources) for entry in self.sources):
            raise ValueError("sources of kind 'several' cannot be nested; list all in one table")
        return self

    def remote_location(self) -> str:
        return next(filter(None, (entry.source.remote_location() for entry in self.sources)), "")

    def field_names(self) -> tuple[str, ...]:
        """Return the fields of all sources, or nothing if one of them does not know its fields."""
        known = [entry.field_names() for entry in self.sources]
        return tuple(dict.fromkeys(sum(known, ()))) if all(known) else ()

    def field_kinds(self, piece: Piece) -> dict[str, FieldKind]:
        """Return the kinds of the fields of a piece's source, by their new names."""
        entry = self.sources[piece.source]
        kinds = entry.source.field_kinds(piece)
        return {entry.rename.get(name, name): kind for name, kind in kinds.items()}

    def class_names(self, piece: Piece) -> dict[str, tuple[str, ...]]:
        """Return the class names of a piece's source, by the new names of its fields."""
        entry = self.sources[piece.source]
        names = entry.source.class_names(piece)
        return {entry.rename.get(field, field): names[field] for field in names}

    def list_pieces(self) -> tuple[Piece, ...]:
        """Return the pieces of all sources, each with the index of its source."""
        all_pieces: list[Piece] = []
        for number, entry in enumerate(self.sources):
            try:
                pieces = entry.source.list_pieces()
            except RegaugeError as error:
                raise error.add_location(f"source {number + 1}") from None
            for piece in pieces:
                name = f"source {number + 1}: {piece.name}"
                text_bytes = int(piece.text_bytes * entry.fraction)
                all_pieces.append(piece._replace(name=name, text_bytes=text_bytes, source=number))
        return tuple(all_pieces)

    def read(self, piece: Piece) -> Iterator[SourceItem]:
        """Yield the selected items of a piece's source, with renamed fields."""
        entry = self.sources[piece.source]
        reason = f"outside the fraction of source {piece.source + 1}"
        for item in entry.source.read(piece):
            if not isinstance(item, Record):
                yield item
                continue
            renamed = _rename_fields(item, entry.rename)
            if isinstance(renamed, Record) and not _is_selected(item.fields, entry.fraction):
                yield Skipped(reason, renamed.fields)
            else:
                yield renamed


def _is_selected(fields: dict[str, Value], fraction: float) -> bool:
    if fraction == 1:
        return True
    try:
        content = duplicates.hash_content(duplicates.encode_fields(fields))
    except UnicodeEncodeError:  # undecodable text is rejected, whichever source it is from
        return True
    return duplicates.draw_uniform(content, 0, "share") < fraction


def _rename_fields(record: Record, names: dict[str, str]) -> Record | Rejected:
    if not names:
        return record
    fields = {names.get(name, name): value for name, value in record.fields.items()}
    if len(fields) < len(record.fields):
        conflict = next(name for name in names if names[name] in record.fields)
        reason = f"'{conflict}' cannot become '{names[conflict]}', which exists"
        return Rejected(record.file, record.location, reason)
    return record._replace(fields=fields)
