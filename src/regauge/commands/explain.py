"""Document a table, key, choice, verb or exit code; without a name, list all tables.

For example:

    $ regauge explain optimizer.learning_rate
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from regauge import commands, config
from regauge.commands import _reference
from regauge.config import peer_names
from regauge.system import choices, log
from regauge.system.errors import SettingsError
from regauge.system.wording import normalize_key

if TYPE_CHECKING:
    from cyclopts.completion import CompletionContext

Document = dict[str, Any]
MIN_WORD_LENGTH = 3
"""Minimum word length for a search in the keys."""
MIN_WIDTH = 40
"""Columns in the narrowest printed text."""


def complete_word(context: CompletionContext) -> list[str]:
    """Return matching names for shell completion."""
    return [name for name in list_words() if name.startswith(context.incomplete)]


def main(
    word: Annotated[
        str | None,
        Parameter(
            help="Name to explain, such as batch, optimizer.learning_rate, train.optimizer, "
            "strategies/fsdp, train or 65.",
            completer=complete_word,
        ),
    ] = None,
    *,
    markdown: Annotated[
        bool, Parameter(help="Print the reference page for all settings as Markdown.")
    ] = False,
    json: commands.AsJson = False,
) -> Document:
    """Document a name, from the settings classes themselves.

    For example:

        >>> regauge.explain("optimizer.learning_rate")
    """
    if markdown:
        text = _reference.build_page()
        log.print_text(text)
        return {"markdown": text}
    documents = _list_everything() if word is None else _look_up(word)
    if json:
        log.print_json({"matches": documents})
    else:
        for document in documents:
            _print_document(document)
    return {"matches": documents}


def _list_everything() -> list[Document]:
    readers: dict[tuple[str, str], list[str]] = {}
    for verb, root in _reference.settings_roots().items():
        for name in root.model_fields:
            key = _reference.Key(name, root, name)
            readers.setdefault((name, _summarize_key(key)), []).append(verb)
    rows = [
        {"table": name, "description": summary, "read_by": ", ".join(table_readers)}
        for (name, summary), table_readers in sorted(readers.items())
    ]
    codes = [
        {"code": code, "description": text} for code, text in _reference.list_exit_codes().items()
    ]
    return [{"tables": rows, "exit_codes": codes}]


def _look_up(word: str) -> list[Document]:
    """Return the documents for an exit code, folder, choice, key or verb, or for similar names.

    Other systems' names are known, too. Raises SettingsError if nothing is similar.
    """
    if word.isdigit():
        return [_explain_exit_code(int(word))]
    if "/" in word or word in _reference.list_folders():
        choices.allow_imports(word.rpartition("/")[2], Path())
        return [_explain_choice(word)]
    verb, _, path = word.partition(".")
    roots = _reference.settings_roots()
    documents = find_keys(word)
    if not documents and verb in choices.names("verbs"):
        if not path:
            return [_explain_verb(verb)]
        verb_roots = {name: root for name, root in roots.items() if name.split()[0] == verb}
        documents = find_keys(path, verb_roots)
    documents = documents or _find_similar(word)
    if not documents and (reason := peer_names.find_absence(word)):
        problem = f"'{word}' from other systems does not have a counterpart: {reason}"
        raise SettingsError(problem, "list all tables with 'regauge explain'")
    if not documents:
        remedy = choices.did_you_mean(word, list_words())
        is_close = remedy.startswith("did you mean")
        listing = "list all tables with 'regauge explain'"
        raise SettingsError(f"nothing is named '{word}'", remedy if is_close else listing)
    return documents


def _find_similar(word: str) -> list[Document]:
    documents = []
    for setting in peer_names.find_settings(word):
        key, _, value = setting.partition("=")
        use = {"use": setting} if value else {}
        documents += [use | document for document in find_keys(key)]
    documents += [_explain_choice(choice) for choice in _find_choices(word)]
    if documents or len(word) < MIN_WORD_LENGTH:
        return documents
    rows = {
        row["key"]: {**row, "key": path}
        for path, row in _list_rows()
        if normalize_key(word) in path.replace("-", "_")
    }
    return [{"matches": list(rows.values())}] if rows else []


def _find_choices(word: str) -> list[str]:
    """Return the choices, as `folder/name`, with a name here or in another system."""
    name = normalize_key(word)
    return [
        f"{folder}/{choice}"
        for folder in _reference.list_folders()
        for choice in choices.names(folder)
        if name == normalize_key(choice)
        or name in getattr(choices.load(folder, choice), "peer_names", ())
    ]


def _list_rows() -> Iterator[tuple[str, dict[str, str]]]:
    for root in _reference.settings_roots().values():
        for key in _reference.list_keys(root):
            yield key.path, key.format_row()
    for folder in _reference.list_folders():
        for choice in choices.names(folder):
            for key in _reference.list_keys(choices.load(folder, choice)):
                yield f"{folder}/{choice}: {key.path}", key.format_row()


def _print_document(document: Document) -> None:
    """Print a document; a table becomes a list of names and descriptions."""
    for name, value in document.items():
        if not commands.is_table(value):
            commands.show({name: value}, as_json=False)
            continue
        log.stdout.print(f"{name.replace('_', ' ')}:")
        for row in value:
            title, *details = (
                f"default {text}" if key == "default" else str(text)
                for key, text in row.items()
                if key != "description"
            )
            facts = f" ({', '.join(details)})" if details else ""
            _print_wrapped(f"{title}{facts}", "  ")
            _print_wrapped(str(row["description"]), "    ")


def _print_wrapped(text: str, indent: str) -> None:
    width = max(MIN_WIDTH, log.stdout.width)
    log.stdout.print(
        textwrap.fill(
            text,
            width,
            initial_indent=indent,
            subsequent_indent=f"{indent}  ",
            break_long_words=False,
            break_on_hyphens=False,
        ),
        markup=False,
    )


def _explain_exit_code(code: int) -> Document:
    codes = _reference.list_exit_codes()
    if code not in codes:
        known = ", ".join(map(str, codes))
        raise SettingsError(f"no exit code {code}", f"known: {known}")
    return {"exit_code": code, "description": codes[code]}


def _explain_choice(word: str) -> Document:
    """Explain `strategies`, `strategies/fsdp` or `data/sources/text`."""
    folders = _reference.list_folders()
    if word in folders:
        return {"folder": word, "choices": _list_choices(word)}
    folder, _, name = word.rpartition("/")
    if folder not in folders:
        raise SettingsError(f"no folder '{folder}'", choices.did_you_mean(folder, folders))
    summary = choices.summary(folder, name)
    return {"choice": word, "description": summary} | _format_keys(choices.load(folder, name))


def _list_choices(folder: str) -> list[Document]:
    names = choices.names(folder)
    return [{"choice": name, "description": choices.summary(folder, name)} for name in names]


def _explain_verb(name: str) -> Document:
    document: Document = {"verb": name, "description": choices.summary("verbs", name)}
    root = _reference.settings_roots().get(name)
    if root is None:
        return document
    rows = [
        {"table": table, "description": _summarize_key(_reference.Key(table, root, table))}
        for table in root.model_fields
    ]
    return document | {"tables": rows}


def _summarize_key(key: _reference.Key) -> str:
    if key.table:
        return _reference.first_docstring_line(key.table)
    return key.format_row()["description"] or key.format_type()


def find_keys(path: str, roots: dict[str, type[config.Settings]] | None = None) -> list[Document]:
    """Return the documents for a dotted path in all roots; equal documents are merged."""
    documents: list[tuple[Document, list[str]]] = []
    for verb, root in (roots or _reference.settings_roots()).items():
        for document in _walk_path(root, path.split("."), ""):
            readers = next((readers for other, readers in documents if other == document), None)
            if readers is None:
                documents.append((document, [verb]))
            elif verb not in readers:
                readers.append(verb)
    return [document | {"read_by": ", ".join(readers)} for document, readers in documents]


def _walk_path(model: type[config.Settings], names: list[str], prefix: str) -> Iterator[Document]:
    """Yield a path's document; below a choice, one for each choice with the key."""
    name, *inner_names = names
    if name not in model.model_fields:
        return
    key = _reference.Key(f"{prefix}{name}", model, name)
    if not inner_names:
        yield _explain_key(key)
    elif key.folder:
        for choice in choices.names(key.folder):
            choice_class = choices.load(key.folder, choice)
            yield from _walk_path(choice_class, inner_names, f"{key.path} ({choice}).")
    elif key.table:
        yield from _walk_path(key.table, inner_names, f"{key.path}.")


def _explain_key(key: _reference.Key) -> Document:
    document: Document = dict(key.format_row())
    if key.folder:
        return document | {"choices": _list_choices(key.folder)}
    if key.table:
        return document | {"description": _summarize_key(key)} | _format_keys(key.table)
    return document


def _format_keys(model: type[config.Settings]) -> Document:
    rows = [key.format_row() for key in _reference.list_keys(model)]
    return {"keys": rows} if rows else {}


def list_words() -> tuple[str, ...]:
    """Return all explainable names, sorted."""
    words = {*choices.names("verbs"), *_reference.list_folders()}
    for root in _reference.settings_roots().values():
        words |= {*root.model_fields, *(key.path for key in _reference.list_keys(root))}
    for folder in _reference.list_folders():
        words |= {f"{folder}/{name}" for name in choices.names(folder)}
    return tuple(sorted(words))
