"""The reference page of all settings, as Markdown; `docs/settings.md` is this text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from regauge import choices, config
from regauge.verbs import _settings

_HEAD = """\
# Settings

Written by `regauge explain --markdown > docs/settings.md`; a test compares the two. Values are
TOML. A *choice* is a table with the `kind` that names it, or that name alone as text."""


def page() -> str:
    """Return the whole page."""
    parts = [_HEAD, *_verbs(), *_tables(), *_choices(), *_exit_codes()]
    return "\n".join(parts) + "\n"


def _verbs() -> Iterator[str]:
    yield "\n## Verbs\n"
    yield from _rows(
        ("verb", "what it does", "tables it reads"),
        (
            (f"`{name}`", choices.summary("verbs", name.split()[0]), _listed(_tables_of(name)))
            for name in sorted({*choices.names("verbs"), *_settings.roots()})
        ),
    )


def _tables_of(verb: str) -> list[str]:
    root = _settings.roots().get(verb)
    return list(root.model_fields) if root else []


def _tables() -> Iterator[str]:
    """Yield every table once, with the verbs that read it."""
    readers: dict[tuple[str, type[config.Settings] | None, str], list[str]] = {}
    for verb, root in _settings.roots().items():
        for name, field in root.model_fields.items():
            key = _settings.Key(name, field)
            identity = (name, key.table, "" if key.table else str(key.row()))
            readers.setdefault(identity, []).append(verb)
    names = [name for name, _, _ in readers]
    yield "\n## Tables and keys"
    for (name, table, _), verbs in sorted(readers.items(), key=lambda item: item[0][0]):
        several = f" of {', '.join(verbs)}" if names.count(name) > 1 else ""
        yield f"\n### {name}{several}\n"
        root = _settings.roots()[verbs[0]]
        key = _settings.Key(name, root.model_fields[name])
        if table:
            yield f"{_settings.summary(table)} Read by {_listed(verbs)}.\n"
            yield from _keys(_settings.keys(table, f"{name}."))
        else:
            yield f"Read by {_listed(verbs)}.\n"
            yield from _keys([key])


def _choices() -> Iterator[str]:
    yield "\n## Choices"
    for folder in _settings.folders():
        for name in choices.names(folder):
            yield f"\n### {folder}/{name}\n"
            choice = choices.load(folder, name)
            yield f"{choices.summary(folder, name)}"
            keys = list(_settings.keys(choice))
            if keys:
                yield ""
                yield from _keys(keys)


def _exit_codes() -> Iterator[str]:
    yield "\n## Exit codes\n"
    codes = _settings.exit_codes().items()
    yield from _rows(("code", "meaning"), ((str(code), text) for code, text in codes))


def _keys(keys: Iterable[_settings.Key]) -> Iterator[str]:
    rows = [key.row() for key in keys]
    cells = ((f"`{row['key']}`", row["type"], f"`{row['default']}`", row["help"]) for row in rows)
    yield from _rows(("key", "type", "default", "help"), cells)


def _rows(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    for row in (head, ("---",) * len(head), *rows):
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
