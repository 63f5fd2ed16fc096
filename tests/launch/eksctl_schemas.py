"""Strict validation of ClusterConfigs against the schema of eksctl."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from jsonschema import Draft7Validator

from launch.schemas import SCHEMAS

EKSCTL = SCHEMAS / "eksctl" / "schema.v1alpha5.json"


@cache
def _load_validator() -> Draft7Validator:
    if not EKSCTL.is_file():
        pytest.skip(f"no {EKSCTL}: the validity of the ClusterConfig is not proved")
    return Draft7Validator(json.loads(EKSCTL.read_text(encoding="utf-8")))


def find_eksctl_problems(document: dict[str, Any]) -> list[str]:
    """Return what the schema of eksctl does not allow; unknown fields included."""
    return [
        f"{'.'.join(map(str, error.absolute_path))}: {error.message}"
        for error in _load_validator().iter_errors(document)
    ]
