"""A server as an endpoint of SageMaker: requests, their limits, and the endpoint's life on moto."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import botocore.session
import pytest
from moto import mock_aws
from moto.sagemaker.models import sagemaker_backends

import regauge
from launch.batch_schemas import find_request_problems
from regauge.commands.serve import load
from regauge.inference.export.manifest import MANIFEST
from regauge.jobs.clusters.sagemaker_container import build_command
from regauge.jobs.targets import Handle, JobSpec
from regauge.jobs.targets.sagemaker import SageMaker
from regauge.machines.aws_client import AwsClient
from regauge.system.errors import SettingsError

REGION = "us-east-1"
NAME = "qa"
ROLE = "arn:aws:iam::123456789012:role/regauge"
TARGET = {"kind": "sagemaker", "role": ROLE, "max_machines": 4, "requests_per_second": 50.0}
LAUNCH: dict[str, Any] = {
    "image": "123456789012.dkr.ecr.us-east-1.amazonaws.com/regauge:1",
    "instance": "g4dn.xlarge",
    "labels": {"team": "search"},
    "target": [TARGET],
}
SERVE: dict[str, Any] = {
    "artifacts": {"search": "s3://models/qa"},
    "port": 9000,
    "overflow": "truncate",
    "workers": {"start_timeout_seconds": 30.0},
    "http": {"allowed_origins": ["https://app.example.com/?a='b c'"]},
}


def plan(folder: Path, *overrides: str, **serve: Any) -> dict[str, Any]:
    """Return the requests of a server by name, with the rest of the plan."""
    path = folder / f"{NAME}.json"
    path.write_text(json.dumps({"serve": SERVE | serve, "launch": LAUNCH}))
    answer = regauge.launch(path, "serve", *overrides, on="sagemaker", dry_run=True)
    documents = {item["name"]: item["content"] for item in answer["documents"]}
    return {**answer, "documents": documents}


def test_the_requests_are_valid_and_agree(tmp_path: Path) -> None:
    documents = plan(tmp_path)["documents"]
    model, config, endpoint, target, policy = documents.values()
    for name, content in documents.items():
        assert find_request_problems(name, content) == []
    (variant,) = config["ProductionVariants"]
    types = botocore.session.get_session().get_service_model("sagemaker")
    assert variant["InstanceType"] in types.shape_for("ProductionVariantInstanceType").enum
    assert variant["ModelName"] == model["ModelName"]
    assert endpoint["EndpointConfigName"] == config["EndpointConfigName"]
    assert variant["ContainerStartupHealthCheckTimeoutInSeconds"] == 60, "the minimum"
    source = model["PrimaryContainer"]["ModelDataSource"]["S3DataSource"]
    assert source == {
        "S3Uri": "s3://models/qa/",
        "S3DataType": "S3Prefix",
        "CompressionType": "None",
    }
    assert {"Key": "team", "Value": "search"} in model["Tags"]
    resource = f"endpoint/{NAME}/variant/{variant['VariantName']}"
    assert target["ResourceId"] == policy["ResourceId"] == resource
    assert (target["MinCapacity"], target["MaxCapacity"]) == (1, 4)
    configuration = policy["TargetTrackingScalingPolicyConfiguration"]
    assert configuration["TargetValue"] == 50 * 60, "per minute"


def test_the_container_gets_the_settings_of_the_run_file(tmp_path: Path) -> None:
    """The variables of the request give the server what the run file says, but its address."""
    documents = plan(tmp_path, "serve.item_errors=true")["documents"]
    variables = documents["create-model.json"]["PrimaryContainer"]["Environment"]
    (tmp_path / MANIFEST).touch()
    command = build_command({**variables, "SM_MODEL_DIR": str(tmp_path)})
    settings = load(tuple(command[1 : command.index("--host")])).serve
    assert settings.artifacts == {"search": str(tmp_path)}
    assert settings.port == 8080, "SageMaker chooses it"
    assert (settings.item_errors, settings.overflow) == (True, "truncate")
    assert settings.workers.start_timeout_seconds == 30
    assert list(settings.http.allowed_origins) == SERVE["http"]["allowed_origins"]


def test_a_changed_setting_is_a_new_version_of_the_same_endpoint(tmp_path: Path) -> None:
    first, same, second = (
        plan(tmp_path, f"serve.overflow={overflow}")["documents"]["create-endpoint.json"]
        for overflow in ("truncate", "truncate", "refuse")
    )
    assert first == same
    assert first["EndpointName"] == second["EndpointName"]
    assert first["EndpointConfigName"] != second["EndpointConfigName"]


@pytest.mark.parametrize(
    ("overrides", "serve", "message"),
    [
        (("launch.target=[{kind='sagemaker'}]",), {}, "needs a role"),
        ((f"launch.target=[{{kind='sagemaker', role='{ROLE}', max_machines=2}}]",), {}, "the load"),
        (("launch.jobs=5",), {}, "max_machines = 4 is less than launch.jobs"),
        (("launch.secrets.TOKEN=name",), {}, "launch.secrets"),
        ((f"launch.name={'a' * 53}",), {}, "more than 52 characters"),
        ((), {"artifacts": {"qa": "out/artifact"}}, "is not in S3"),
        ((), {"artifacts": {"a": "s3://m/a", "b": "s3://m/b"}}, "launch one endpoint for each"),
        ((), {"http": {"allowed_origins": ["https://a.example"] * 60}}, "SageMaker allows 1024"),
    ],
)
def test_a_server_that_sagemaker_cannot_run_is_refused(
    tmp_path: Path, overrides: tuple[str, ...], serve: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        plan(tmp_path, *overrides, **serve)


def test_only_servers_run_as_endpoints() -> None:
    job = JobSpec(NAME, "train", ("regauge", "train", "/workspace/run.json"), 1, 1, 1)
    with pytest.raises(SettingsError, match="runs servers, not 'train'"):
        SageMaker(role=ROLE).plan(job)


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replace AWS by moto, whose endpoints serve at once; it lacks UpdateEndpoint."""
    call = AwsClient.call

    def update(client: AwsClient, operation: str, **request: Any) -> dict[str, Any]:
        if operation != "update_endpoint":
            return call(client, operation, **request)
        endpoint = sagemaker_backends["123456789012"][REGION].endpoints[request["EndpointName"]]
        endpoint.endpoint_config_name = request["EndpointConfigName"]
        return {}

    monkeypatch.setattr(AwsClient, "call", update)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "moto")
    monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)
    with mock_aws():
        yield


def list_names(kind: str) -> list[str]:
    """Return the names of all objects of a kind, such as `Models`."""
    client = boto3.client("sagemaker", REGION)
    operation = {"Models": "list_models", "EndpointConfigs": "list_endpoint_configs"}[kind]
    answer = getattr(client, operation)()[kind]
    client.close()
    return sorted(item.get("ModelName") or item["EndpointConfigName"] for item in answer)


def submit(folder: Path, **serve: Any) -> Handle:
    path = folder / f"{NAME}.json"
    path.write_text(json.dumps({"serve": SERVE | serve, "launch": LAUNCH}))
    return Handle.parse(regauge.launch(path, "serve", on="sagemaker")["handle"])


def test_an_endpoint_is_created_updated_deleted_and_cleaned_up(
    aws: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del aws
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    launcher = SageMaker()
    handle = submit(tmp_path)
    assert str(handle) == f"sagemaker://{REGION}/{NAME}"
    status = launcher.find_status(handle)
    assert (status.state, len(status.nodes)) == ("running", 1)
    scaling = boto3.client("application-autoscaling", REGION)
    (target,) = scaling.describe_scalable_targets(ServiceNamespace="sagemaker")["ScalableTargets"]
    assert (target["MinCapacity"], target["MaxCapacity"]) == (1, 4)
    assert [event.source for event in launcher.list_events(handle)] == ["sagemaker"] * 2
    with pytest.raises(SettingsError, match="stop it first: regauge job cancel sagemaker://"):
        launcher.clean_up(handle)
    assert submit(tmp_path) == handle
    assert len(list_names("Models")) == 1, "an unchanged model is used again"
    assert submit(tmp_path, overflow="refuse") == handle
    names = list_names("Models")
    assert names == list_names("EndpointConfigs")
    assert len(names) == 2
    client = boto3.client("sagemaker", REGION)
    current = client.describe_endpoint(EndpointName=NAME)["EndpointConfigName"]
    documents = plan(tmp_path, overflow="refuse")["documents"]
    assert current == documents["create-endpoint.json"]["EndpointConfigName"]
    launcher.cancel(handle)
    assert launcher.find_status(handle).state == "cancelled"
    assert not scaling.describe_scalable_targets(ServiceNamespace="sagemaker")["ScalableTargets"]
    with pytest.raises(SettingsError, match="has ended already"):
        launcher.cancel(handle)
    (leftover,) = launcher.clean_up(handle)
    assert leftover.name == f"/aws/sagemaker/Endpoints/{NAME}"
    assert list_names("Models") == list_names("EndpointConfigs") == []
    with pytest.raises(SettingsError, match="has no endpoint qa; correct the handle"):
        launcher.find_status(handle)
    client.close()
    scaling.close()


def test_a_refused_endpoint_leaves_nothing(
    aws: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del aws
    call = AwsClient.call

    def refuse(client: AwsClient, operation: str, **request: Any) -> dict[str, Any]:
        if operation == "create_endpoint":
            raise SettingsError("the quota of ml.g4dn.xlarge is 0", "request a higher quota")
        return call(client, operation, **request)

    monkeypatch.setattr(AwsClient, "call", refuse)
    with pytest.raises(SettingsError, match="the quota"):
        submit(tmp_path)
    assert list_names("Models") == list_names("EndpointConfigs") == []
