"""Selects the files of a split in a dataset's folder, by the rules of the Hugging Face hub.

The metadata of its README may list them under `configs`; otherwise the names of files and folders
decide: https://huggingface.co/docs/hub/datasets-file-names-and-splits
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Any

from fsspec.utils import glob_translate

from regauge.data.sources._suffixes import find_source_kind
from regauge.system.choices import did_you_mean
from regauge.system.errors import DataError

SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""The words in a file name that identify a split."""
SHARD_NAME = re.compile(r"([\w.]+)-\d{5}-of-\d{5}")
"""A file name as the `datasets` library writes it; it starts with the split."""
DEFAULT = "default"


def select_files(
    names: list[str], configs: list[dict[str, Any]], subset: str, split: str
) -> list[str]:
    """Return the files of a split; raises DataError if the subset or the split does not exist.

    `names` are relative to the folder, and `configs` is the table of its README.
    """
    data_files = sorted(filter(find_source_kind, names))
    table = _select_subset(configs, subset)
    patterns = table.get("data_files")
    if not patterns:
        data_dir = PurePosixPath(table.get("data_dir") or ".")
        by_split = _group_by_name(
            [name for name in data_files if PurePosixPath(name).is_relative_to(data_dir)]
        )
    else:
        globs = _read_patterns(patterns)
        by_split = {key: _match(data_files, globs[key]) for key in globs}
    return _select_split(by_split, split)


def select_converted_files(names: list[str], subset: str, split: str) -> list[str]:
    """Return the files of a split among those that the hub has converted to Parquet.

    Their names are `<subset>/<split>/0000.parquet`.
    """
    by_subset: dict[str, dict[str, list[str]]] = {}
    for name in sorted(names):
        if match := re.fullmatch(r"([^/]+)/(?:partial-)?([^/]+)/[^/]+\.parquet", name):
            by_subset.setdefault(match[1], {}).setdefault(match[2], []).append(name)
    table = _select_subset([{"config_name": name} for name in by_subset], subset)
    by_split = by_subset.get(table.get("config_name", ""), {})
    return _select_split(by_split, split)


def _select_split(by_split: dict[str, list[str]], split: str) -> list[str]:
    if not any(by_split.values()):
        raise DataError("it has no data file in a known format", "choose another dataset")
    if not by_split.get(split):
        raise DataError(f"it has no split '{split}'", did_you_mean(split, tuple(by_split)))
    return by_split[split]


def _select_subset(tables: list[dict[str, Any]], subset: str) -> dict[str, Any]:
    """Return the table of a subset: the named one, the default one, or the only one."""
    by_name = {str(table.get("config_name", DEFAULT)): table for table in tables}
    if subset:
        if subset not in by_name:
            remedy = did_you_mean(subset, tuple(by_name)) if by_name else "remove source.subset"
            raise DataError(f"it has no subset '{subset}'", remedy)
        return by_name[subset]
    defaults = [name for name, table in by_name.items() if table.get("default")]
    for name in (*defaults, DEFAULT):
        if name in by_name:
            return by_name[name]
    if len(by_name) > 1:
        problem = f"it has {len(by_name)} subsets: {', '.join(sorted(by_name))}"
        raise DataError(problem, "set source.subset")
    return next(iter(by_name.values()), {})


def _read_patterns(patterns: Any) -> dict[str, list[str]]:
    """Return the globs of each split from `data_files`: a glob, a list of them, or tables."""
    globs_by_split: dict[str, list[str]] = {}
    for item in patterns if isinstance(patterns, list) else [patterns]:
        table = item if isinstance(item, dict) else {"path": item}
        path = table.get("path", [])
        globs = path if isinstance(path, list) else [path]
        names = (str(glob).removeprefix("./") for glob in globs)
        globs_by_split.setdefault(str(table.get("split", "train")), []).extend(names)
    return globs_by_split


def _match(names: list[str], globs: list[str]) -> list[str]:
    pattern = re.compile("|".join(map(glob_translate, globs)))
    return list(filter(pattern.match, names))


def _group_by_name(names: list[str]) -> dict[str, list[str]]:
    """Return files by the split in their names; if no name has one, all are training files."""
    by_split: dict[str, list[str]] = {}
    for name in names:
        if split := _find_split(name):
            by_split.setdefault(split, []).append(name)
    return by_split or ({"train": names} if names else {})


def _find_split(name: str) -> str:
    if shard := SHARD_NAME.match(PurePosixPath(name).name):
        return shard[1]
    words = re.split(r"[^a-z]+", name.lower())
    return next((split for split, known in SPLIT_WORDS.items() if set(known) & set(words)), "")
