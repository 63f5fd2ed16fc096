"""Class names in the features that `datasets` writes to the schema of a table and to a README.

The metadata of a README has them under `dataset_info`, one table for each subset:
https://huggingface.co/docs/hub/datasets-cards
"""

from __future__ import annotations

from typing import Any

from regauge.data.sources._splits import DEFAULT

CLASS_LABEL = "ClassLabel"
"""The type of a feature with classes, in the schema of a table."""


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
        if isinstance(feature, dict) and (texts := find_names(feature)):
            names[str(feature.get("name"))] = texts
    return names


def find_names(feature: Any) -> tuple[str, ...]:
    """Return the names of a ClassLabel or of a list of them; empty for other features.

    `feature` is as in a README (`dtype`) or as in the schema of a table (`_type`).
    """
    if isinstance(feature, list) and len(feature) == 1:
        return find_names(feature[0])
    if not isinstance(feature, dict):
        return ()
    if feature.get("_type") == CLASS_LABEL:
        return _sort_names(feature.get("names"))
    if isinstance(label := feature.get("class_label"), dict):
        return _sort_names(label.get("names"))
    inner = (feature.get(key) for key in ("dtype", "sequence", "list"))
    tables = (value for value in inner if isinstance(value, dict))
    return find_names(next(tables, feature.get("feature")))


def _sort_names(names: Any) -> tuple[str, ...]:
    """Return names, which are a list or a table by their numbers, in order."""
    if isinstance(names, dict) and all(str(number).isdecimal() for number in names):
        names = [names[number] for number in sorted(names, key=int)]
    return tuple(map(str, names)) if isinstance(names, list) else ()
