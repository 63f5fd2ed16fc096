"""An endpoint's requests to SageMaker and to Application Auto Scaling.

https://docs.aws.amazon.com/sagemaker/latest/APIReference
"""

from __future__ import annotations

import hashlib
import json
import shlex
from typing import Any

from regauge.jobs.targets import JobSpec
from regauge.jobs.targets._aws_batch.container import require_machine
from regauge.jobs.targets._aws_batch.documents import build_tags
from regauge.jobs.targets._server_spec import ServerSpec
from regauge.system.errors import SettingsError
from regauge.system.units import SECONDS_PER_MINUTE

MODEL, CONFIG, ENDPOINT = "create-model", "create-endpoint-config", "create-endpoint"
TARGET, POLICY = "register-scalable-target", "put-scaling-policy"
"""Request names."""
VARIANT = "AllTraffic"
"""The endpoint's only production variant."""
OPTIONS_VARIABLE, NAME_VARIABLE = "REGAUGE_SERVE_OPTIONS", "REGAUGE_MODEL_NAME"
"""Variables that the container reads (`clusters.sagemaker_container`)."""
MAX_VALUE = 1024
"""Maximum characters in an environment variable."""
MAX_NAME = 52
"""Maximum characters in an endpoint name, so that a model's name with a digest has at most 63."""
START_LIMITS = (60, 3600)
"""Limits for the time to load the model, in seconds."""
ARCHIVES = (".tar.gz", ".tgz")
SCALE_IN_SECONDS, SCALE_OUT_SECONDS = 300, 60
"""Pauses after removing machines and after adding them."""


def build_requests(
    job: JobSpec, server: ServerSpec, role: str, limits: tuple[int, float] | None
) -> dict[str, dict[str, Any]]:
    """Return the requests by name, in the order in which they are sent.

    `limits` are the maximum machine count, and the requests per second for each machine. The model
    and the configuration have a digest in their names, so a changed run file gets new ones.
    Raises SettingsError for a server that SageMaker cannot run.
    """
    if len(job.name) > MAX_NAME:
        problem = f"launch.name = '{job.name}' has more than {MAX_NAME} characters"
        raise SettingsError(problem, "shorten it")
    tags = [{"Key": key, "Value": value} for key, value in build_tags(job).items()]
    container = _build_container(job, server)
    machine = require_machine(job, "SageMaker", "g5.xlarge")
    low, high = START_LIMITS
    seconds = min(max(low, round(server.start_seconds)), high)
    variant = {
        "VariantName": VARIANT,
        "InitialInstanceCount": job.jobs,
        "InstanceType": f"ml.{machine.name}",
        "ModelDataDownloadTimeoutInSeconds": high,
        "ContainerStartupHealthCheckTimeoutInSeconds": seconds,
    }
    text = json.dumps([container, role, variant], sort_keys=True)
    name = f"{job.name}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"
    model = {"ModelName": name, "ExecutionRoleArn": role, "PrimaryContainer": container}
    variants = [{**variant, "ModelName": name}]
    requests: dict[str, dict[str, Any]] = {
        MODEL: {**model, "Tags": tags},
        CONFIG: {"EndpointConfigName": name, "ProductionVariants": variants, "Tags": tags},
        ENDPOINT: {"EndpointName": job.name, "EndpointConfigName": name, "Tags": tags},
    }
    return requests if limits is None else requests | _build_scaling(job, *limits)


def identify_target(endpoint: str) -> dict[str, str]:
    """Return an endpoint's key for Application Auto Scaling."""
    return {
        "ServiceNamespace": "sagemaker",
        "ResourceId": f"endpoint/{endpoint}/variant/{VARIANT}",
        "ScalableDimension": "sagemaker:variant:DesiredInstanceCount",
    }


def _build_scaling(
    job: JobSpec, max_machines: int, requests_per_second: float
) -> dict[str, dict[str, Any]]:
    """Return the scalable target, and a policy that keeps the requests per machine and minute."""
    if max_machines < job.jobs:
        problem = f"launch.target.max_machines = {max_machines} is less than launch.jobs"
        raise SettingsError(problem, f"set it to at least {job.jobs}")
    key = identify_target(job.name)
    policy = {
        "TargetValue": requests_per_second * SECONDS_PER_MINUTE,
        "PredefinedMetricSpecification": {
            "PredefinedMetricType": "SageMakerVariantInvocationsPerInstance"
        },
        "ScaleInCooldown": SCALE_IN_SECONDS,
        "ScaleOutCooldown": SCALE_OUT_SECONDS,
    }
    return {
        TARGET: {**key, "MinCapacity": job.jobs, "MaxCapacity": max_machines},
        POLICY: {
            "PolicyName": job.name,
            **key,
            "PolicyType": "TargetTrackingScaling",
            "TargetTrackingScalingPolicyConfiguration": policy,
        },
    }


def _build_container(job: JobSpec, server: ServerSpec) -> dict[str, Any]:
    """Return the image, the model's address, and the variables with the server's settings."""
    if job.image is None:
        remedy = "set it to an image in Amazon ECR, with a tag or digest"
        raise SettingsError("launch.image is not set, and SageMaker runs containers", remedy)
    if len(server.artifacts) > 1:
        problem = f"serve.artifacts has {len(server.artifacts)} models, and an endpoint serves one"
        raise SettingsError(problem, "launch one endpoint for each")
    ((name, address),) = server.artifacts.items()
    if not address.startswith("s3://"):
        problem = f"serve.artifacts.{name} = '{address}' is not in S3"
        raise SettingsError(problem, "copy the artifact: aws s3 cp --recursive DIR s3://BUCKET/DIR")
    is_archive = address.endswith(ARCHIVES)
    source = {
        "S3Uri": address if is_archive else f"{address.rstrip('/')}/",
        "S3DataType": "S3Object" if is_archive else "S3Prefix",
        "CompressionType": "Gzip" if is_archive else "None",
    }
    options = {OPTIONS_VARIABLE: shlex.join(server.options), NAME_VARIABLE: name}
    environment = dict(job.environment) | {key: text for key, text in options.items() if text}
    for key, text in environment.items():
        if len(text) > MAX_VALUE:
            problem = f"the variable {key} has {len(text)} characters"
            remedy = "shorten the settings below serve, or launch.environment"
            raise SettingsError(f"{problem}, and SageMaker allows {MAX_VALUE}", remedy)
    return {
        "Image": job.image,
        "ModelDataSource": {"S3DataSource": source},
        "Environment": environment,
    }
