"""Say what a table, a key, a choice or an exit code is; without a word, list all tables."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from regauge import choices, config, log, verbs
from regauge.errors import SettingsError
from regauge.verbs import _markdown, _settings

Document = dict[str, Any]


def main(
    word: Annotated[
        str | None,
        Parameter(help="as optimizer.learning_rate, train.optimizer, strategies/fsdp, train, 65"),
    ] = None,
    *,
    markdown: Annotated[bool, Parameter(help="print the whole reference page")] = False,
    json: verbs.AsJson = False,
) -> Document:
    """Explain a word out of the settings classes themselves."""
    if markdown:
        text = _markdown.page()
        sys.stdout.write(text)
        return {"markdown": text}
    documents = _overview() if word is None else _lookup(word)
    if json:
        log.answer({"found": documents})
    else:
        for document in documents:
            verbs.show(document, as_json=False)
    return {"found": documents}


def _overview() -> list[Document]:
    readers: dict[tuple[str, str], list[str]] = {}
    for verb, root in _settings.roots().items():
        for name, field in root.model_fields.items():
            readers.setdefault((name, _what(name, field)), []).append(verb)
    rows = [
        {"table": name, "what": what, "read by": ", ".join(found)}
        for (name, what), found in sorted(readers.items())
    ]
    codes = [{"code": code, "meaning": text} for code, text in _settings.exit_codes().items()]
    return [{"tables": rows, "exit_codes": codes}]


def _what(name: str, field: Any) -> str:
    key = _settings.Key(name, field)
    if key.table:
        return _settings.summary(key.table)
    return key.row()["help"] or key.type_text()


def _lookup(word: str) -> list[Document]:
    """Return what a word stands for: an exit code, a folder, a choice, a key, a verb."""
    if word.isdigit():
        return [_exit_code(int(word))]
    if "/" in word or word in _settings.folders():
        choices.allow(word.rpartition("/")[2], Path())
        return [_choice(word)]
    first, _, rest = word.partition(".")
    by_verb = _settings.roots()
    found = _find(by_verb, word)
    if not found and first in choices.names("verbs"):
        if not rest:
            return [_verb(first)]
        own = {name: root for name, root in by_verb.items() if name.split()[0] == first}
        found = _find(own, rest)
    if not found:
        raise SettingsError(f"nothing is named '{word}'", choices.did_you_mean(word, _words()))
    return found


def _exit_code(code: int) -> Document:
    codes = _settings.exit_codes()
    if code not in codes:
        known = ", ".join(map(str, codes))
        raise SettingsError(f"no exit code {code}", f"known: {known}")
    return {"exit_code": code, "meaning": codes[code]}


def _choice(word: str) -> Document:
    """Explain `strategies`, `strategies/fsdp` or `data/sources/text`."""
    folders = _settings.folders()
    if word in folders:
        return {"folder": word, "choices": _choices(word)}
    folder, _, name = word.rpartition("/")
    if folder not in folders:
        raise SettingsError(f"no folder '{folder}'", choices.did_you_mean(folder, folders))
    return {"choice": word, "what": choices.summary(folder, name)} | _keys_of(
        choices.load(folder, name)
    )


def _choices(folder: str) -> list[Document]:
    names = choices.names(folder)
    return [{"choice": name, "what": choices.summary(folder, name)} for name in names]


def _verb(name: str) -> Document:
    document: Document = {"verb": name, "what": choices.summary("verbs", name)}
    root = _settings.roots().get(name)
    if root is None:
        return document
    rows = [{"table": key, "what": _what(key, field)} for key, field in root.model_fields.items()]
    return document | {"tables": rows}


def _find(by_verb: dict[str, type[config.Settings]], path: str) -> list[Document]:
    """Return what a dotted path names in each root, once where roots share it."""
    found: list[tuple[Document, list[str]]] = []
    for verb, root in by_verb.items():
        for document in _walk(root, path.split("."), ""):
            same = next((readers for other, readers in found if other == document), None)
            if same is None:
                found.append((document, [verb]))
            elif verb not in same:
                same.append(verb)
    return [document | {"read_by": ", ".join(readers)} for document, readers in found]


def _walk(model: type[config.Settings], parts: list[str], inside: str) -> Iterator[Document]:
    """Yield what the path names; below a choice, in each choice that has the key."""
    name, *rest = parts
    if name not in model.model_fields:
        return
    key = _settings.Key(f"{inside}{name}", model.model_fields[name])
    if not rest:
        yield _key(key)
    elif key.folder:
        for choice in choices.names(key.folder):
            where = f"{key.path} ({choice})."
            yield from _walk(choices.load(key.folder, choice), rest, where)
    elif key.table:
        yield from _walk(key.table, rest, f"{key.path}.")


def _key(key: _settings.Key) -> Document:
    document: Document = dict(key.row())
    if key.folder:
        return document | {"choices": _choices(key.folder)}
    if key.table:
        return document | {"what": _settings.summary(key.table)} | _keys_of(key.table)
    return document


def _keys_of(model: type[config.Settings]) -> Document:
    rows = [key.row() for key in _settings.keys(model)]
    return {"keys": rows} if rows else {}


def _words() -> tuple[str, ...]:
    """Return every word that can be explained, for did-you-mean."""
    words = {*choices.names("verbs"), *_settings.folders()}
    for root in _settings.roots().values():
        words |= {*root.model_fields, *(key.path for key in _settings.keys(root))}
    for folder in _settings.folders():
        words |= {f"{folder}/{name}" for name in choices.names(folder)}
    return tuple(sorted(words))
