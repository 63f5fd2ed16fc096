"""Strict validation of ClusterConfigs and manifests against the schemas of public projects."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from jsonschema import Draft7Validator

from architecture.tree import ROOT

SCHEMAS = Path(os.environ.get("REGAUGE_SCHEMAS", ROOT.parent / "shared" / "schemas"))
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


def find_manifest_problems(document: dict[str, Any], version: str) -> list[str]:
    """Return what a version of Kubernetes does not allow; unknown fields included."""
    try:
        kubernetes_validate.validate(document, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [error.message]
    return []
