"""Class names in the card of a dataset: the features in the metadata of its README.

`datasets` writes them under `dataset_info`, one table for each subset:
https://huggingface.co/docs/hub/datasets-cards
"""

from __future__ import annotations

from typing import Any

from regauge.data.sources._splits import DEFAULT


def read_class_names(dataset_info: Any, subset: str) -> dict[str, tuple[str, ...]]:
    """Return the names of the features of type ClassLabel, by field.

    `dataset_info` is the table of the metadata, or a list of tables with `config_name`. Lists of
    classes have names, too. Entries of another shape are skipped.
    """
    tables = dataset_info if isinstance(dataset_info, list) else [dataset_info]
    tables = [table for table in tables if isinstance(table, dict)]
    name = subset or DEFAULT
    matches = [table for table in tables if table.get("config_name", name) == name]
    if not matches and not subset and len(tables) == 1:
        matches = tables
    features = matches[0].get("features") if matches else None
    names: dict[str, tuple[str, ...]] = {}
    for feature in features if isinstance(features, list) else ():
        if isinstance(feature, dict) and (texts := _find_names(feature)):
            names[str(feature.get("name"))] = texts
    return names


def _find_names(feature: dict[str, Any]) -> tuple[str, ...]:
    """Return the names of a ClassLabel or of a list of them; empty for other features."""
    label = feature.get("class_label")
    if isinstance(label, dict):
        return _sort_names(label.get("names"))
    inner = (feature.get(key) for key in ("dtype", "sequence", "list"))
    return next((_find_names(value) for value in inner if isinstance(value, dict)), ())


def _sort_names(names: Any) -> tuple[str, ...]:
    """Return names, which are a list or a table by their numbers, in order."""
    if isinstance(names, dict) and all(str(number).isdecimal() for number in names):
        names = [names[number] for number in sorted(names, key=int)]
    return tuple(map(str, names)) if isinstance(names, list) else ()
