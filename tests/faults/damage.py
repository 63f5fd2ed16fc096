"""Damages of files: what disks, other programs and other users do to a file."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

Damage = Callable[[Path, random.Random], None]
OUTSIDE = "outside.txt"
"""Name of the file of another user, next to the damaged folder."""
DEPTH = 100_000


def write(content: bytes) -> Damage:
    """Return a damage that replaces the content of a file."""

    def replace(path: Path, _draw: random.Random) -> None:
        path.write_bytes(content)

    return replace


def remove(path: Path, _draw: random.Random) -> None:
    path.unlink(missing_ok=True)


def cut(path: Path, draw: random.Random) -> None:
    content = path.read_bytes() if path.exists() else b""
    path.write_bytes(content[: draw.randrange(len(content) + 1)])


def flip(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes() if path.exists() else b"{}")
    if content:
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def clear(path: Path, _draw: random.Random) -> None:
    path.write_bytes(bytes(path.stat().st_size if path.exists() else 8))


def make_folder(path: Path, _draw: random.Random) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


def make_full_folder(path: Path, draw: random.Random) -> None:
    make_folder(path, draw)
    (path / "a").write_text("a")


def make_pipe(path: Path, _draw: random.Random) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def link_outside(path: Path, _draw: random.Random) -> None:
    """Replace a file by a link to the file of another user."""
    path.unlink(missing_ok=True)
    path.symlink_to(find_outside(path))


def link_to_nothing(path: Path, _draw: random.Random) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(path.parent / "nothing")


def link_to_itself(path: Path, _draw: random.Random) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(path)


def append(line: bytes) -> Damage:
    """Return a damage that appends a line to a file."""

    def add(path: Path, _draw: random.Random) -> None:
        with path.open("ab") as file:
            file.write(line + b"\n")

    return add


def drop_key(path: Path, draw: random.Random) -> None:
    """Remove a key of a random object of a document, or of the last line."""
    _change(path, draw, lambda table, key: table.pop(key))


def change_type(path: Path, draw: random.Random) -> None:
    """Give a key of a random object of a document, or of the last line, another type."""
    others: tuple[Any, ...] = (None, [], {}, "text", 1.5, -1, True, [None], {"a": {}}, 10**400)
    _change(path, draw, lambda table, key: table.update({key: draw.choice(others)}))


def _change(
    path: Path, draw: random.Random, change: Callable[[dict[str, Any], str], object]
) -> None:
    """Change a random key of a JSON document, or of the last line of a JSON Lines file."""
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    texts = ["\n".join(lines)] if path.suffix == ".json" or not lines else lines
    try:
        document = json.loads(texts[-1])
    except ValueError:
        return
    keys = list(_list_keys(document))
    if keys:
        change(*draw.choice(keys))
    path.write_text("\n".join([*texts[:-1], json.dumps(document)]) + "\n")


def _list_keys(value: Any) -> list[tuple[dict[str, Any], str]]:
    if isinstance(value, dict):
        inner = [pair for item in value.values() for pair in _list_keys(item)]
        return [*((value, key) for key in value), *inner]
    return [pair for item in value for pair in _list_keys(item)] if isinstance(value, list) else []


def find_outside(path: Path) -> Path:
    """Return the file of another user: next to one of the parents of a path."""
    return next(folder / OUTSIDE for folder in path.parents if (folder / OUTSIDE).exists())


DAMAGES: dict[str, Damage] = {
    "removed": remove,
    "empty": write(b""),
    "cut": cut,
    "flipped bit": flip,
    "zeros": clear,
    "not UTF-8": write(b"\xff\xfe\x00"),
    "null": write(b"null"),
    "list": write(b"[]"),
    "object": write(b"{}"),
    "number": write(b"1e999"),
    "text": write(b'"text"'),
    "deep list": write(b"[" * DEPTH),
    "deep object": write(b'{"a":' * DEPTH + b"1" + b"}" * DEPTH),
    "moderately deep": write(b'{"a":' * 400 + b"1" + b"}" * 400),
    "folder": make_folder,
    "full folder": make_full_folder,
    "pipe": make_pipe,
    "link": link_outside,
    "link to nothing": link_to_nothing,
    "link to itself": link_to_itself,
    "line null": append(b"null"),
    "line list": append(b"[]"),
    "line object": append(b"{}"),
    "line deep": append(b"[" * DEPTH),
    "no key": drop_key,
    "other type": change_type,
}
"""Damages by name."""


def copy_folder(folder: Path, target: Path) -> Path:
    """Copy a folder, and put the file of another user next to the copy; return the copy."""
    target.parent.mkdir(parents=True, exist_ok=True)
    (target.parent / OUTSIDE).write_text("of another user\n")
    shutil.copytree(folder, target)
    return target
