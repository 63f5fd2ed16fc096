"""Which fields of records are answered, and which stand beside the answers, as the first show."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from regauge.choices import did_you_mean
from regauge.data.sources import Record, Rejected
from regauge.errors import DataError, SettingsError

if TYPE_CHECKING:
    from regauge.data.sources import Piece, Source, Value
    from regauge.prediction.settings import Predicting

FIRST = 1000
"""Records that are looked at."""
USUAL = "text"
"""The field that is answered where several hold texts and none is named."""
Kinds = dict[str, str]
"""Fields by what they hold: "text", "integer" or "real"."""


def look(source: Source, pieces: tuple[Piece, ...]) -> Kinds:
    """Return the fields of the first records, in the order in which they are met.

    Those that the first piece names itself come first. One with whole and other numbers holds real
    ones; of texts and numbers the first counts. Raises DataError where there is no record.
    """
    kinds: Kinds = source.kinds(pieces[0]) if pieces else {}
    bad: Rejected | None = None
    records = 0
    for found in chain.from_iterable(map(source.read, pieces)):
        if isinstance(found, Rejected):
            bad = bad or found
        elif isinstance(found, Record):
            records += 1
            for name, value in found.fields.items():
                both = {kinds.setdefault(name, kind_of(value)), kind_of(value)}
                if both == {"integer", "real"}:
                    kinds[name] = "real"
            if records == FIRST:
                break
    if records:
        return kinds
    if bad is not None:
        detail = f" ({bad.detail})" if bad.detail else ""
        problem = f"{bad.file}, {bad.place}: {bad.reason}{detail}, and no record before or behind"
        raise DataError(problem, "correct the file, or name another")
    raise DataError("the source has no record", "name files that hold some")


def kind_of(value: Value) -> str:
    """Return what a field holds, as a value of it shows."""
    if isinstance(value, str):
        return "text"
    return "integer" if isinstance(value, int) else "real"


def answered(settings: Predicting, of_artifact: tuple[str, ...], kinds: Kinds) -> tuple[str, ...]:
    """Return the fields with a record's texts: those asked for, the artifact's, or the only one.

    Raises SettingsError where it is not clear which, or one holds no texts.
    """
    asked, wanted = settings.predict.texts, max(1, len(of_artifact))
    if asked and len(asked) != wanted:
        problem = f"the artifact reads {wanted} texts of a record"
        raise SettingsError(problem, f"name as many in predict.texts, not {len(asked)}")
    known = tuple(name for name, kind in kinds.items() if kind == "text")
    names = asked or of_artifact or ((USUAL,) if USUAL in known else known)
    if not names:
        raise SettingsError("the first records have no text", "name another source")
    if len(names) > wanted:
        problem = f"records hold several texts: {', '.join(names)}"
        raise SettingsError(problem, f'name one: predict.texts=["{names[-1]}"]')
    for name in names:
        if name not in known:
            remedy = did_you_mean(name, known) if known else "its records hold no text"
            if known and not asked:
                remedy = f"name others in predict.texts, {remedy}"
            raise SettingsError(f"the first records have no text '{name}'", remedy)
    return names


def beside(settings: Predicting, texts: tuple[str, ...], kinds: Kinds) -> Kinds:
    """Return the fields that stand beside an answer; SettingsError for one that is not there."""
    wanted = settings.output.keep
    if wanted == "others":
        return {name: kind for name, kind in kinds.items() if name not in texts}
    for name in wanted:
        if name not in kinds:
            problem = f"the first records have no text or number '{name}'"
            raise SettingsError(problem, did_you_mean(name, tuple(kinds)))
    return {name: kinds[name] for name in wanted}
