"""Validation of requests to AWS: strictly against the schemas, and against botocore's model."""

from __future__ import annotations

import json
from typing import Any

import botocore.session
import botocore.validate
from jsonschema import Draft202012Validator

from launch.schemas import SCHEMAS

BATCH_SCHEMAS = SCHEMAS / "batch"
OPERATIONS = {
    "register-job-definition.json": ("batch", "RegisterJobDefinition"),
    "submit-job.json": ("batch", "SubmitJob"),
    "create-compute-environment.json": ("batch", "CreateComputeEnvironment"),
    "create-scheduling-policy.json": ("batch", "CreateSchedulingPolicy"),
    "create-job-queue.json": ("batch", "CreateJobQueue"),
    "create-launch-template.json": ("ec2", "CreateLaunchTemplate"),
    "create-model.json": ("sagemaker", "CreateModel"),
    "create-endpoint-config.json": ("sagemaker", "CreateEndpointConfig"),
    "create-endpoint.json": ("sagemaker", "CreateEndpoint"),
    "register-scalable-target.json": ("application-autoscaling", "RegisterScalableTarget"),
    "put-scaling-policy.json": ("application-autoscaling", "PutScalingPolicy"),
}
"""Service and operation of each document."""


def find_request_problems(name: str, content: dict[str, Any]) -> list[str]:
    """Return what botocore's model of an operation does not allow in a request."""
    service, operation = OPERATIONS[name]
    model = botocore.session.get_session().get_service_model(service)
    shape = model.operation_model(operation).input_shape
    report = botocore.validate.ParamValidator().validate(content, shape)
    unknown = content.keys() - shape.members.keys()
    return [*report.generate_report().splitlines(), *(f"{key} is unknown" for key in unknown)]


def find_schema_problems(name: str, content: dict[str, Any]) -> list[str]:
    """Return what the strict schema of a request does not allow; empty if it is valid."""
    service, operation = OPERATIONS[name]
    assert service == "batch"
    path = BATCH_SCHEMAS / f"{operation}Request.schema.json"
    validator = Draft202012Validator(json.loads(path.read_text(encoding="utf-8")))
    return [
        f"{'.'.join(map(str, error.absolute_path))}: {error.message}"
        for error in validator.iter_errors(content)
    ]
