"""Which files of a dataset's folder are of a split, as the Hugging Face hub has it.

The head of its README may say it, under `configs`; without that, the names of files and folders do:
https://huggingface.co/docs/hub/datasets-file-names-and-splits
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Any

from fsspec.utils import glob_translate

from regauge.choices import did_you_mean
from regauge.data.sources import _compressed
from regauge.errors import DataError

FORMS = {
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".jsonl": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".txt": "text",
}
"""The source that reads files of an ending."""
WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""What in a name stands for a split."""
SHARD = re.compile(r"([\w.]+)-\d{5}-of-\d{5}")
"""A file's name as the hub's own library writes it, which begins with its split."""
DEFAULT = "default"


def form(name: str) -> str:
    """Return the kind of source that reads a file; nothing for one that is no data."""
    path = PurePosixPath(name)
    hidden = any(part.startswith((".", "__")) for part in path.parts)
    ending = PurePosixPath(path.stem).suffix if path.suffix in _compressed.SUFFIXES else path.suffix
    return "" if hidden else FORMS.get(ending, "")


def chosen(names: list[str], configs: list[dict[str, Any]], subset: str, split: str) -> list[str]:
    """Return the files of a split; raises DataError for a subset or a split that is not there.

    `names` are relative to the folder, `configs` are those of its README.
    """
    data = sorted(filter(form, names))
    table = _subset(configs, subset)
    patterns = table.get("data_files")
    if not patterns:
        below = PurePosixPath(table.get("data_dir") or ".")
        by_split = _by_name([name for name in data if PurePosixPath(name).is_relative_to(below)])
    else:
        globs = _by_split(patterns)
        by_split = {key: _matching(data, globs[key]) for key in globs}
    return _of_split(by_split, split)


def converted(names: list[str], subset: str, split: str) -> list[str]:
    """Return the files of a split among those that the hub has converted to Parquet.

    They are named `<subset>/<split>/0000.parquet`.
    """
    by_subset: dict[str, dict[str, list[str]]] = {}
    for name in sorted(names):
        if found := re.fullmatch(r"([^/]+)/(?:partial-)?([^/]+)/[^/]+\.parquet", name):
            by_subset.setdefault(found[1], {}).setdefault(found[2], []).append(name)
    table = _subset([{"config_name": name} for name in by_subset], subset)
    by_split = by_subset.get(table.get("config_name", ""), {})
    return _of_split(by_split, split)


def _of_split(by_split: dict[str, list[str]], split: str) -> list[str]:
    if not any(by_split.values()):
        raise DataError("there is no file of data that can be read", "name other files")
    if not by_split.get(split):
        raise DataError(f"there is no split '{split}'", did_you_mean(split, tuple(by_split)))
    return by_split[split]


def _subset(tables: list[dict[str, Any]], subset: str) -> dict[str, Any]:
    """Return the table of a subset: the named one, the default one, or the only one."""
    by_name = {str(table.get("config_name", DEFAULT)): table for table in tables}
    if subset:
        if subset not in by_name:
            remedy = did_you_mean(subset, tuple(by_name)) if by_name else "leave source.subset out"
            raise DataError(f"there is no subset '{subset}'", remedy)
        return by_name[subset]
    marked = [name for name, table in by_name.items() if table.get("default")]
    for name in (*marked, DEFAULT):
        if name in by_name:
            return by_name[name]
    if len(by_name) > 1:
        problem = f"there are {len(by_name)} subsets: {', '.join(sorted(by_name))}"
        raise DataError(problem, "set source.subset")
    return next(iter(by_name.values()), {})


def _by_split(patterns: Any) -> dict[str, list[str]]:
    """Return the globs of each split, given one for all, a list of them, or tables of both."""
    found: dict[str, list[str]] = {}
    for item in patterns if isinstance(patterns, list) else [patterns]:
        table = item if isinstance(item, dict) else {"path": item}
        path = table.get("path", [])
        globs = path if isinstance(path, list) else [path]
        names = (str(glob).removeprefix("./") for glob in globs)
        found.setdefault(str(table.get("split", "train")), []).extend(names)
    return found


def _matching(names: list[str], globs: list[str]) -> list[str]:
    wanted = re.compile("|".join(map(glob_translate, globs)))
    return list(filter(wanted.match, names))


def _by_name(names: list[str]) -> dict[str, list[str]]:
    """Return files by the split that their names tell; all are to train on where none does."""
    found: dict[str, list[str]] = {}
    for name in names:
        if told := _told(name):
            found.setdefault(told, []).append(name)
    return found or ({"train": names} if names else {})


def _told(name: str) -> str:
    if shard := SHARD.match(PurePosixPath(name).name):
        return shard[1]
    words = re.split(r"[^a-z]+", name.lower())
    return next((split for split, said in WORDS.items() if set(said) & set(words)), "")
