"""Strict validation of launched documents against the schemas of public projects.

The schemas are in `../shared/schemas`, next to the repository, or in the folder that the variable
REGAUGE_SCHEMAS names. A field that a schema does not define is an error, as is a wrong type.
"""

from __future__ import annotations

import os
import re
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from architecture.tree import ROOT

SCHEMAS = Path(os.environ.get("REGAUGE_SCHEMAS", ROOT.parent / "shared" / "schemas"))
KUBERNETES_VERSION = "1.34"
METADATA = {"name", "namespace", "labels", "annotations"}
"""Fields of metadata that a client sets."""
RESOURCE_FILES = {
    "PyTorchJob": "pytorchjob/kubeflow.org_pytorchjobs.v{}.yaml",
    "TrainJob": "trainjob/trainer.kubeflow.org_trainjobs.v{}.yaml",
    "TrainingRuntime": "trainjob/trainer.kubeflow.org_clustertrainingruntimes.v{}.yaml",
    "JobSet": "trainjob/trainer.kubeflow.org_clustertrainingruntimes.v{}.yaml",
}
"""File of each kind; a TrainingRuntime has the specification of a ClusterTrainingRuntime, which
contains that of a JobSet."""
LATEST = {"PyTorchJob": "1.9.0", "TrainJob": "2.2.1", "TrainingRuntime": "2.2.1", "JobSet": "2.2.1"}
JOB_SET_VERSION = "jobset.x-k8s.io/v1alpha2"
LABEL_1035 = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")


def require_schemas(proof: str) -> None:
    """Skip the test if the schemas are not on this machine."""
    if not SCHEMAS.is_dir():
        pytest.skip(f"no schemas in {SCHEMAS}: {proof} is not proved")


def find_problems(document: dict[str, Any], version: str | None = None) -> list[str]:
    """Return what a schema does not allow in a Kubernetes document; empty if it is valid.

    `version` is that of the operator, for the kinds of Kubeflow.
    """
    kind = document["kind"]
    problems = [f"metadata.{key} is unknown" for key in document["metadata"].keys() - METADATA]
    if kind not in RESOURCE_FILES:
        return problems + find_core_problems(document)
    if not LABEL_1035.fullmatch(document["metadata"]["name"]):
        problems.append("metadata.name must match RFC 1035")
    validator = _load_validator(kind, version or LATEST[kind])
    return problems + [
        f"{'.'.join(map(str, error.absolute_path))}: {error.message}"
        for error in validator.iter_errors(document)
    ]


def find_core_problems(document: dict[str, Any], version: str = KUBERNETES_VERSION) -> list[str]:
    """Return what a version of Kubernetes does not allow in a document of Kubernetes itself."""
    import kubernetes_validate

    try:
        kubernetes_validate.validate(document, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{'.'.join(map(str, error.path))}: {error.message}"]
    return []


@cache
def _load_validator(kind: str, version: str) -> Draft202012Validator:
    text = (SCHEMAS / RESOURCE_FILES[kind].format(version)).read_text()
    definition = yaml.load(text, Loader=yaml.CSafeLoader)
    (served,) = (item for item in definition["spec"]["versions"] if item["storage"])
    schema = _make_strict(deepcopy(served["schema"]["openAPIV3Schema"]))
    group = definition["spec"]["group"]
    version_name = f"{group}/{served['name']}"
    if kind == "JobSet":
        template = schema["properties"]["spec"]["properties"]["template"]
        schema["properties"]["spec"] = template["properties"]["spec"]
        version_name = JOB_SET_VERSION
    schema["properties"]["apiVersion"] = {"const": version_name}
    schema["properties"]["kind"] = {"const": kind}
    schema["required"] = ["apiVersion", "kind", "metadata", "spec"]
    return Draft202012Validator(schema)


def _make_strict(schema: dict[str, Any]) -> dict[str, Any]:
    """Forbid the fields that a structural schema does not define, at every depth."""
    if schema.get("x-kubernetes-int-or-string"):
        return {**_keep(schema, "pattern"), "type": ["integer", "string"]}
    if "properties" in schema:
        schema["properties"] = {
            name: item if name == "metadata" and "properties" not in item else _make_strict(item)
            for name, item in schema["properties"].items()
        }
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            schema["additionalProperties"] = False
    elif isinstance(schema.get("additionalProperties"), dict):
        schema["additionalProperties"] = _make_strict(schema["additionalProperties"])
    if "items" in schema:
        schema["items"] = _make_strict(schema["items"])
    return schema


def _keep(schema: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: schema[name] for name in names if name in schema}
