"""The Markdown reference page for all settings, `docs/reference/settings.md`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from regauge import config
from regauge.commands import _reference
from regauge.system import choices

_HEAD = """\
# Settings

Written by `regauge explain --markdown > docs/reference/settings.md`. Values are TOML. A *choice* is
a table with a `kind`, or the name of the kind alone."""


def build_page() -> str:
    lines = [_HEAD, *_format_verbs(), *_format_tables(), *_format_choices(), *_format_exit_codes()]
    return "\n".join(lines) + "\n"


def _format_verbs() -> Iterator[str]:
    yield "\n## Verbs\n"
    yield from _format_rows(
        ("verb", "description", "tables"),
        (
            (f"`{verb}`", choices.summary("verbs", verb.split()[0]), _format_tables_of(verb))
            for verb in sorted({*choices.names("verbs"), *_reference.settings_roots()})
        ),
    )


def _format_tables_of(verb: str) -> str:
    root = _reference.settings_roots().get(verb)
    return _format_names(root.model_fields) if root else ""


def _format_tables() -> Iterator[str]:
    """Yield a section per distinct table, with the verbs reading it."""
    readers: dict[tuple[str, type[config.Settings] | None, str], list[str]] = {}
    for verb, root in _reference.settings_roots().items():
        for name in root.model_fields:
            key = _reference.Key(name, root, name)
            identity = (name, key.table, "" if key.table else str(key.format_row()))
            readers.setdefault(identity, []).append(verb)
    names = [name for name, _, _ in readers]
    yield "\n## Tables and keys"
    for (name, table, _), verbs in sorted(readers.items(), key=lambda item: item[0][0]):
        suffix = f" of {', '.join(verbs)}" if names.count(name) > 1 else ""
        yield f"\n### {name}{suffix}\n"
        root = _reference.settings_roots()[verbs[0]]
        key = _reference.Key(name, root, name)
        if table:
            yield f"{_reference.first_docstring_line(table)} Read by {_format_names(verbs)}.\n"
            yield from _format_keys(_reference.list_keys(table, f"{name}."))
        else:
            yield f"Read by {_format_names(verbs)}.\n"
            yield from _format_keys([key])


def _format_choices() -> Iterator[str]:
    yield "\n## Choices"
    for folder in _reference.list_folders():
        for name in choices.names(folder):
            yield f"\n### {folder}/{name}\n"
            choice = choices.load(folder, name)
            yield f"{choices.summary(folder, name)}"
            keys = list(_reference.list_keys(choice))
            if keys:
                yield ""
                yield from _format_keys(keys)


def _format_exit_codes() -> Iterator[str]:
    yield "\n## Exit codes\n"
    codes = _reference.list_exit_codes().items()
    yield from _format_rows(("code", "description"), ((str(code), text) for code, text in codes))


def _format_keys(keys: Iterable[_reference.Key]) -> Iterator[str]:
    rows = [key.format_row() for key in keys]
    cells = (
        (f"`{row['key']}`", row["type"], f"`{row['default']}`", row["description"]) for row in rows
    )
    yield from _format_rows(("key", "type", "default", "description"), cells)


def _format_rows(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    for row in (header, ("---",) * len(header), *rows):
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"


def _format_names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
