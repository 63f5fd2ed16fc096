"""Kubernetes documents: golden files, strict schemas, refusals, checks, and states of jobs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from architecture.tree import ROOT
from launch.schemas import find_problems, require_schemas
from regauge.commands.launch import read_request
from regauge.jobs import lints_kubernetes
from regauge.jobs.lints import run_lints, walk
from regauge.jobs.planning import check_lints, plan_job, select_launcher
from regauge.jobs.targets import (
    Document,
    Handle,
    JobSpec,
    LaunchPlan,
    LeaderAddress,
    Machine,
    Volume,
)
from regauge.jobs.targets._kubernetes.documents import build_restart_script
from regauge.jobs.targets._kubernetes.job_client import JobClient
from regauge.jobs.targets._kubernetes.job_status import JobObjects, describe_job
from regauge.jobs.targets._kubernetes.kubectl import KubectlNamespace
from regauge.jobs.targets._kubernetes.pods import load_device_resources
from regauge.jobs.targets._server_spec import ServerSpec
from regauge.jobs.targets.kubernetes import Kubernetes
from regauge.machines.catalog import load_chips
from regauge.system import timing
from regauge.system.errors import SettingsError, TransientError

GOLDEN = Path(__file__).parent / "golden"
P5 = Machine("p5.48xlarge", "H100-SXM-80GB", "NVIDIA", 8, 32, 192, 2048, 55.04, "2026-07-20")
P4DE = Machine("p4de.24xlarge", "A100-SXM-80GB", "NVIDIA", 8, 4, 96, 1152, 27.447, "2026-07-20")
TRN1 = Machine("trn1.32xlarge", "Trainium1", "AWS", 16, 8, 128, 512, 21.5, "2026-07-20")
DL1 = Machine("dl1.24xlarge", "Gaudi1", "Intel/Habana", 8, 4, 96, 768, 13.109, "2026-07-20")


def build_volume(name: str, mount: str, source: str, kind: str = "claim", **values: Any) -> Volume:
    fields = {"name": name, "mount": mount, "source": source, "kind": kind}
    return Volume.model_validate(fields | values)


LUSTRE = build_volume("files", "/fsx", "fs-0123456789abcdef0/abcdefgh", "fsx")
JOB = JobSpec(
    name="llama",
    verb="train",
    command=("regauge", "train", "/workspace/llama.toml", "seed=3"),
    min_nodes=2,
    max_nodes=2,
    processes=8,
    machine=P5,
    image="registry.example/regauge:0.2.0",
    environment={"FI_PROVIDER": "efa"},
    secrets={"HF_TOKEN": "hub/token"},
    volumes=(LUSTRE,),
    hours=24.0,
    output="/fsx/llama",
    run_file_text="# A run\nseed = 1\n",
    labels={"team": "search"},
)
ELASTIC = replace(JOB, min_nodes=1, max_nodes=4, machine=P4DE)
PREDICT = replace(
    JOB,
    verb="predict",
    command=("regauge", "predict", "/workspace/llama.toml", "predict.job_count=8"),
    min_nodes=1,
    max_nodes=1,
    environment={},
    jobs=8,
    machine=replace(P5, name="p5.4xlarge", chips=1, efa_interfaces=1, vcpus=16, memory_gib=256),
)
POD = {
    "service_account": "trainer",
    "image_pull_secrets": ["registry"],
    "node_selector": {"pool": "research"},
    "tolerations": [{"key": "dedicated", "operator": "Equal", "value": "research"}],
    "priority_class": "high",
    "zone": "us-east-1b",
}
ETCD = replace(ELASTIC, rendezvous="etcd", rendezvous_endpoint="etcd.etcd:2379", spot=True)
OVERRIDES = {"runtime": "torch-distributed"}
OLD_RUNTIME = {**OVERRIDES, "trainjob_version": "2.0"}
STAGES = ("base", "train", "gate")
PIPELINE = replace(
    JOB,
    verb="pipeline",
    command=("regauge", "pipeline", "/workspace/llama.toml"),
    stages=tuple(
        replace(
            JOB,
            name=f"llama-{stage}",
            verb=verb,
            command=("regauge", "pipeline", "/workspace/llama.toml", "--wait", "--until", stage),
            min_nodes=2 if verb == "train" else 1,
            max_nodes=2 if verb == "train" else 1,
            stage=stage,
            after=f"llama-{previous}" if previous else "",
        )
        for stage, previous, verb in zip(
            STAGES, ("", *STAGES), ("prepare", "train", "gate"), strict=False
        )
    ),
)
SERVER = replace(
    PREDICT,
    verb="serve",
    command=("regauge", "serve", "/workspace/qa.toml", "serve.host=0.0.0.0"),
    jobs=2,
    max_attempts=3,
    hours=None,
    output="",
    machine=replace(P5, name="c7i.4xlarge", chips=0, efa_interfaces=0, vcpus=16, memory_gib=32),
    server=ServerSpec(port=8080, start_seconds=300.0, drain_seconds=30.0),
)
PROMETHEUS = "http://prometheus.monitoring:9090"
PLANS: dict[str, tuple[JobSpec, dict[str, Any]]] = {
    "pytorchjob": (ELASTIC, {"pod": POD, "queue": "research", "ttl_seconds": 3600}),
    "pytorchjob-etcd": (ETCD, {"namespace": "research"}),
    "trainjob": (JOB, {"pod": POD, "queue": "research"}),
    "trainjob-2.0": (JOB, {"trainjob_version": "2.0"}),
    "trainjob-2.1": (JOB, {"trainjob_version": "2.1"}),
    "trainjob-runtime-2.0": (replace(JOB, hours=None), OLD_RUNTIME),
    "trainjob-runtime-2.1": (replace(JOB, hours=None), {**OVERRIDES, "trainjob_version": "2.1"}),
    "trainjob-runtime-2.2": (JOB, {**OVERRIDES, "trainjob_version": "2.2"}),
    "job": (replace(PREDICT, jobs=1, verb="evaluate"), {"pod": POD, "ttl_seconds": 60}),
    "job-array": (PREDICT, {}),
    "jobset": (PIPELINE, {"pod": POD, "ttl_seconds": 60}),
    "server": (SERVER, {"pod": POD, "server": {"max_replicas": 8}}),
}
SHARED_KINDS = {"ConfigMap", "PersistentVolume", "PersistentVolumeClaim"}
"""Kinds that every plan has; the golden file of `trainjob` has them for all."""
OPERATOR_VERSIONS = {
    "PyTorchJob": ("1.7.0", "1.8.1", "1.9.0"),
    "TrainJob": ("2.0.1", "2.1.0", "2.2.1"),
    "TrainingRuntime": ("2.0.1", "2.1.0", "2.2.1"),
    "JobSet": ("2.0.1", "2.1.0", "2.2.1"),
}
HANDLE = Handle.parse("kubernetes://here/default/pytorchjob/llama")


def build_plan(job: JobSpec = JOB, **settings: Any) -> LaunchPlan:
    """Return the plan of a job, with settings as in a run file."""
    settings = {"region": "us-east-1", **settings}
    return Kubernetes.model_validate(settings, strict=False).plan(job)


def find_document(plan: LaunchPlan, kind: str) -> dict[str, Any]:
    (content,) = (item.content for item in plan.documents if item.content["kind"] == kind)
    return dict(content)


def find_container(plan: LaunchPlan) -> dict[str, Any]:
    return dict(find_pod(plan)["containers"][0])


def find_pod(plan: LaunchPlan) -> dict[str, Any]:
    """Return the specification of the pods of a plan, which all of its roles share."""
    (template,) = lints_kubernetes.list_templates(plan)
    return template.spec


@pytest.mark.parametrize("name", PLANS)
def test_the_documents_equal_the_golden_file(name: str) -> None:
    job, settings = PLANS[name]
    plan = build_plan(job, **settings)
    documents = [
        item
        for item in plan.documents
        if name == "trainjob" or item.content["kind"] not in SHARED_KINDS
    ]
    text = "".join(f"# {item.name}\n---\n{item.text}" for item in documents)
    path = GOLDEN / f"kubernetes-{name}.yaml"
    if "REGAUGE_WRITE_GOLDEN" in os.environ:
        path.write_text(text)
    assert text == path.read_text()
    assert build_plan(job, **settings) == plan


@pytest.mark.parametrize("name", PLANS)
def test_every_document_is_valid_for_its_versions(name: str) -> None:
    require_schemas("that the documents are valid")
    job, settings = PLANS[name]
    for document in build_plan(job, **settings).documents:
        kind = document.content["kind"]
        versions: tuple[str | None, ...] = OPERATOR_VERSIONS.get(kind, (None,))
        if kind in {"TrainJob", "TrainingRuntime"}:
            chosen = settings.get("trainjob_version", "2.2")
            versions = tuple(item for item in versions if item and item.startswith(chosen))
        for version in versions:
            assert find_problems(document.content, version) == []


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("PyTorchJob", "spec.elasticPolicy.minNodes", 1),
        ("PyTorchJob", "spec.elasticPolicy.rdzvPort", "29400"),
        ("PyTorchJob", "spec.pytorchReplicaSpecs.Worker.template.spec.sharedMemory", 1),
        ("TrainJob", "spec.elasticPolicy", {}),
        ("TrainJob", "spec.trainer.numNodes", "2"),
        ("Job", "spec.template.spec.gpu", 8),
        ("ConfigMap", "datum", {}),
    ],
)
def test_the_validation_finds_a_wrong_field(kind: str, path: str, value: Any) -> None:
    require_schemas("that wrong documents are detected")
    plans = {"PyTorchJob": ELASTIC, "Job": PREDICT}
    document = deepcopy(find_document(build_plan(plans.get(kind, JOB)), kind))
    assert find_problems(document) == []
    target = document
    *parents, last = path.split(".")
    for name in parents:
        target = target[name]
    target[last] = value
    assert find_problems(document)


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_uses_every_setting_and_passes_the_checks(name: str) -> None:
    job, settings = PLANS[name]
    plan = build_plan(job, **settings)
    assert [lint for lint in run_lints(plan) if lint.is_error] == []
    is_foreign = "runtime" in settings or job.server is not None
    assert ("max_attempts" in plan.used) == (not is_foreign)
    assert ("hours" in plan.used) == (settings.get("trainjob_version") == "2.2" or not is_foreign)


@pytest.mark.parametrize("instance", ["p5.48xlarge", "p4de.24xlarge"])
@pytest.mark.parametrize("size", ["7b", "13b", "70b"])
def test_the_reference_runs_are_valid_and_pass_the_checks(size: str, instance: str) -> None:
    run_file = ROOT / "runs" / f"eks-llama2-{size}.toml"
    request, settings = read_request(run_file, "train", (f"launch.instance={instance}",))
    plan = plan_job(request, settings.launch, select_launcher(settings.launch, "kubernetes"))
    assert check_lints(plan) == []
    assert plan.job.max_nodes * (plan.job.machine.chips if plan.job.machine else 0) == 128
    kinds = [document.content["kind"] for document in plan.documents]
    assert kinds[-1] == ("TrainJob" if size == "13b" else "PyTorchJob")
    interfaces = {"p5.48xlarge": 32, "p4de.24xlarge": 4}[instance]
    requests = {
        value
        for document in plan.documents
        for path, value in walk(document.content)
        if path.endswith("amazonaws.com/efa")
    }
    assert requests == {interfaces}
    require_schemas("that the documents of the reference runs are valid")
    for document in plan.documents:
        assert find_problems(document.content) == []


def test_elastic_nodes_are_a_pytorch_job_and_fixed_nodes_a_train_job() -> None:
    plan = build_plan(ELASTIC)
    assert find_document(plan, "PyTorchJob")
    assert "the number of nodes is 1:4, and a TrainJob is not elastic" in plan.notes[0]
    plan = build_plan()
    assert find_document(plan, "TrainJob")
    assert "TrainJob, because the number of nodes is fixed (2)" in plan.notes[0]
    assert find_document(build_plan(api="pytorchjob"), "PyTorchJob")


def test_an_elastic_train_job_is_refused_and_names_the_other_kind() -> None:
    with pytest.raises(SettingsError, match=r"cannot have elastic nodes.*1:4.*'pytorchjob'"):
        build_plan(ELASTIC, api="trainjob")


@pytest.mark.parametrize(
    ("machine", "resource", "chips", "interfaces"),
    [
        (P5, "nvidia.com/gpu", 8, 32),
        (P4DE, "nvidia.com/gpu", 8, 4),
        (TRN1, "aws.amazon.com/neuron", 16, 8),
        (DL1, "habana.ai/gaudi", 8, 4),
    ],
)
def test_devices_and_efa_are_in_requests_and_limits(
    machine: Machine, resource: str, chips: int, interfaces: int
) -> None:
    plan = build_plan(replace(ELASTIC, machine=machine))
    resources = find_container(plan)["resources"]
    devices = {resource: chips, "vpc.amazonaws.com/efa": interfaces, "hugepages-2Mi": "5120Mi"}
    memory = {"memory": resources["requests"]["memory"]}
    assert resources["limits"] == devices | memory
    assert devices.items() <= resources["requests"].items()
    assert int(resources["requests"]["cpu"]) < (machine.vcpus or 0)
    assert {item["key"] for item in find_pod(plan)["tolerations"]} >= {resource}


@pytest.mark.parametrize("name", [name for name in PLANS if "runtime" not in name])
def test_pods_meet_the_restricted_standard(name: str) -> None:
    job, settings = PLANS[name]
    claims = tuple(volume for volume in job.volumes if volume.kind != "host")
    plan = build_plan(replace(job, volumes=claims), **settings)
    for template in lints_kubernetes.list_templates(plan):
        assert find_restricted_problems(template.spec) == []


def test_the_restricted_standard_can_be_left_and_forbids_host_paths() -> None:
    volume = Volume(name="scratch", mount="/scratch", source="/mnt", kind="host")
    job = replace(PREDICT, volumes=(volume,))
    assert find_restricted_problems(find_pod(build_plan(job))) == ["hostPath"]
    assert "pod-security" in {lint.code for lint in run_lints(build_plan(job))}
    plan = build_plan(job, pod={"security": {"restricted": False}})
    assert find_restricted_problems(find_pod(plan)) != ["hostPath"]
    assert "pod-security" not in {lint.code for lint in run_lints(plan)}


def find_restricted_problems(pod: dict[str, Any]) -> list[str]:
    """Return what the Pod Security Standard `restricted` forbids in a pod.

    https://kubernetes.io/docs/concepts/security/pod-security-standards
    """
    identity, container = pod.get("securityContext", {}), pod["containers"][0]
    privileges = container.get("securityContext", {})
    kinds = {key for volume in pod["volumes"] for key in volume} - {
        *("name", "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral"),
        *("persistentVolumeClaim", "projected", "secret"),
    }
    rules = {
        "runAsNonRoot": identity.get("runAsNonRoot") is True,
        "runAsUser": identity.get("runAsUser") != 0,
        "seccompProfile": identity.get("seccompProfile", {}).get("type") == "RuntimeDefault",
        "allowPrivilegeEscalation": privileges.get("allowPrivilegeEscalation") is False,
        "privileged": not privileges.get("privileged"),
        "capabilities": privileges.get("capabilities") == {"drop": ["ALL"]},
        "host": not any(pod.get(f"host{name}") for name in ("Network", "PID", "IPC")),
    }
    return [name for name, is_met in rules.items() if not is_met] + sorted(kinds)


def test_pods_have_the_affinity_annotations_and_identity_of_the_settings() -> None:
    terms = [{"topologyKey": "kubernetes.io/hostname"}]
    affinity = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
    spread = {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
    pod = {
        "affinity": affinity,
        "topology_spread": [spread],
        "annotations": {"example.org/team": "search"},
        "security": {"run_as_user": 1000, "fs_group": 2000},
    }
    (template,) = lints_kubernetes.list_templates(build_plan(PREDICT, pod=pod))
    assert template.spec["affinity"] == affinity
    assert template.spec["topologySpreadConstraints"] == [spread]
    identity = template.spec["securityContext"]
    assert (identity["runAsUser"], identity["fsGroup"]) == (1000, 2000)
    (document,) = (item for item in build_plan(PREDICT, pod=pod).documents if "job" in item.name)
    annotations = document.content["spec"]["template"]["metadata"]["annotations"]
    assert annotations == {"example.org/team": "search"}


def test_one_node_requests_no_efa() -> None:
    assert "vpc.amazonaws.com/efa" not in find_container(build_plan(PREDICT))["resources"]["limits"]


def test_every_vendor_of_accelerators_has_a_resource() -> None:
    vendors = {chip.vendor for chip in load_chips().values()} - {"CPU"}
    assert vendors == set(load_device_resources())


def test_the_pods_of_an_array_have_an_index() -> None:
    plan = build_plan(PREDICT)
    commands = Kubernetes().list_node_commands(plan, LeaderAddress("127.0.0.1", 1, "run-1"))
    assert [item.environment["JOB_COMPLETION_INDEX"] for item in commands] == list("01234567")


def test_pods_get_commands_with_dollars_unchanged() -> None:
    """A pod expands `$(NAME)`, and `$$` is a dollar."""
    words = ("regauge", "train", "/workspace/run.toml", "a$$b", "output.folder=out/$(HOME)")
    text = "x $(PATH) $$(Y) $1"
    for job in (JOB, ELASTIC, PREDICT):
        changed = replace(job, command=words, environment={"NAME": text})
        plan = build_plan(changed)
        assert any("output.folder=out/$$(HOME)" in item.text for item in plan.documents)
        [node, *_] = Kubernetes().list_node_commands(plan, LeaderAddress("127.0.0.1", 1, "run-1"))
        assert node.command[-5:] == words
        assert node.environment["NAME"] == text


def test_the_commands_of_a_rehearsal_have_the_variables_of_the_operator() -> None:
    leader = LeaderAddress("127.0.0.1", 4321, "run-7")
    first, *others = Kubernetes().list_node_commands(build_plan(ELASTIC), leader)
    assert len(others) == 3
    assert first.command[-4:] == ELASTIC.command
    assert first.environment["PET_NNODES"] == "1:4"
    assert first.environment["PET_RDZV_ENDPOINT"] == "127.0.0.1:4321"
    assert first.environment["PET_RDZV_ID"] == "run-7"
    assert "HF_TOKEN" not in first.environment
    nodes = Kubernetes().list_node_commands(build_plan(), leader)
    assert [node.environment["PET_NODE_RANK"] for node in nodes] == ["0", "1"]
    assert nodes[1].environment["PET_RDZV_ENDPOINT"] == "127.0.0.1:4321"


def test_values_cannot_change_the_structure_of_a_document() -> None:
    values = {"A": "x\n- name: B", "B": "{{ job.image }}", "C": "<<0>>", "D": '"}', "E": ""}
    text = "a: <<1>>\n# \x85 \U0001f600\n"
    plan = build_plan(replace(ELASTIC, environment=values, run_file_text=text))
    environment = find_container(plan)["env"]
    assert {item["name"]: item["value"] for item in environment if "value" in item} == values
    assert find_document(plan, "ConfigMap")["data"] == {"llama.toml": text}


def test_a_relative_output_is_below_the_working_folder() -> None:
    relative = build_plan(replace(PREDICT, output="out/run"))
    annotations = find_document(relative, "Job")["metadata"]["annotations"]
    assert annotations["regauge/output"] == "/workspace/out/run"


WRONG_LUSTRE = build_volume("files", "/fsx", "fs-01", "fsx")
EBS = build_volume("disk", "/disk", "vol-0123456789abcdef0", "ebs")


@pytest.mark.parametrize(
    ("changes", "settings", "message"),
    [
        ({"image": None}, {}, r"launch\.image is not set"),
        ({"name": "a" * 60}, {}, r"more than 54 characters; shorten it"),
        ({"secrets": {"TOKEN": "abc"}}, {}, r"launch\.secrets\.TOKEN .*NAME/KEY"),
        ({"labels": {"team": "a b"}}, {}, r"launch\.labels: 'team = a b'"),
        ({"volumes": (EBS,)}, {}, r"EBS volume, which one node can mount"),
        ({"volumes": (WRONG_LUSTRE,)}, {}, r"not the source of FSx"),
        ({}, {"region": None}, r"region of 'files' is not set; set launch\.target\.region"),
        ({"volumes": (build_volume("run-file", "/fsx", "data"),)}, {}, r"'run-file' is reserved"),
        ({"volumes": (build_volume("disk", "/disk", "x", "efs"),)}, {}, r"not the id of a file"),
        ({"machine": replace(P5, vendor="Nobody")}, {}, r"accelerators of Nobody"),
        ({"run_file_text": "#" * (1 << 20)}, {}, r"larger than 1 MiB"),
        ({"command": ("regauge", "train", "/workspace/my run.toml")}, {}, r"key of a ConfigMap"),
        ({}, {"runtime": "torch", "ttl_seconds": 1}, r"ttl_seconds has no effect"),
        ({}, {"runtime": "torch", "pod": {"priority_class": "high"}}, r"priority_class"),
        ({}, {"runtime": "torch", "pod": {"grace_seconds": 9}}, r"grace_seconds"),
        ({}, {**OLD_RUNTIME, "pod": {"image_pull_secrets": ["registry"]}}, r"image_pull_secrets"),
        ({"min_nodes": 1, "max_nodes": 1}, {"api": "pytorchjob"}, r"at least two nodes"),
        ({"min_nodes": 1, "rendezvous": "etcd"}, {}, r"set execution\.nodes\.endpoint"),
        (
            {"min_nodes": 1, "rendezvous": "etcd", "rendezvous_endpoint": "etcd:port"},
            {},
            r"'etcd:port' is invalid",
        ),
    ],
)
def test_a_job_that_kubernetes_cannot_run_is_refused(
    changes: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingsError, match=message) as caught:
        build_plan(replace(JOB, **changes), **settings)
    assert re.fullmatch(r"[^;\n]+; [^;\n]+", str(caught.value)), "problem and remedy in one line"


def change_document(plan: LaunchPlan, kind: str, path: str, value: Any) -> LaunchPlan:
    """Return a plan in which a field of a document has another value."""
    documents = deepcopy(plan.documents)
    target = find_document(replace(plan, documents=documents), kind)
    *parents, last = path.split(".")
    for name in parents:
        target = target[int(name) if name.isdigit() else name]
    target[last] = value
    return replace(plan, documents=documents)


CONTAINER = "spec.pytorchReplicaSpecs.Worker.template.spec.containers.0"
FOUR_GPUS = {"nvidia.com/gpu": 4}
CPU_METRIC = [{"type": "Resource", "resource": {"name": "cpu"}}]


def change_container(path: str, value: Any) -> LaunchPlan:
    return change_document(build_plan(ELASTIC), "PyTorchJob", f"{CONTAINER}.{path}", value)


@pytest.mark.parametrize(
    ("code", "plan"),
    [
        ("container-name", change_container("name", "main")),
        ("dns-label", change_document(build_plan(ELASTIC), "PyTorchJob", "metadata.name", "1a")),
        ("trainjob-ttl", build_plan(JOB, ttl_seconds=60)),
        (
            "autoscaler-metric",
            change_document(
                build_plan(ELASTIC), "PyTorchJob", "spec.elasticPolicy.metrics", CPU_METRIC
            ),
        ),
        ("device-limits", change_container("resources.requests", FOUR_GPUS)),
        (
            "device-limits",
            change_document(
                build_plan(JOB), "TrainJob", "spec.trainer.resourcesPerNode.limits", FOUR_GPUS
            ),
        ),
        ("pull-policy", build_plan(replace(ELASTIC, image="registry.example/regauge:latest"))),
        ("output-volume", build_plan(replace(ELASTIC, output="out/llama"))),
        ("reserved-variable", build_plan(replace(JOB, environment={"PET_NNODES": "3"}))),
        ("efa-count", change_container("resources.limits", {"vpc.amazonaws.com/efa": 1})),
        ("shared-memory", change_container("volumeMounts", [])),
        ("efa-variable", build_plan(replace(ELASTIC, machine=None))),
        ("image-tag", build_plan(replace(ELASTIC, image="registry.example/regauge"))),
    ],
)
def test_a_check_reports_its_problem(code: str, plan: LaunchPlan) -> None:
    assert code in {lint.code for lint in run_lints(plan)}


def test_an_empty_request_of_a_device_equals_its_limit() -> None:
    """Kubernetes copies the limit of a device to a request that is not set."""
    plan = change_container("resources.requests", {"cpu": "1"})
    assert "device-limits" not in {lint.code for lint in run_lints(plan)}


def test_the_checks_ignore_plans_of_other_targets() -> None:
    plan = LaunchPlan(JOB, (Document("job.json", {"kind": "x"}), Document("job.sh", "exit 0\n")))
    for check in lints_kubernetes.CHECKS:
        assert list(check(plan)) == []


@pytest.mark.parametrize(
    "text",
    [
        "kubernetes://here/default/pytorchjob",
        "kubernetes://here/default/pods/llama",
        "kubernetes://here/llama",
    ],
)
def test_a_handle_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="CONTEXT/NAMESPACE/KIND/NAME"):
        JobClient.open(Handle.parse(text))


def test_the_context_of_a_handle_may_contain_slashes() -> None:
    text = "kubernetes://arn:aws:eks:us-east-1:1:cluster/a/research/trainjob/llama"
    client = JobClient.open(Handle.parse(text))
    assert client.cluster.context == "arn:aws:eks:us-east-1:1:cluster/a"
    assert (client.cluster.namespace, client.name) == ("research", "llama")
    assert client.resource == "trainjobs.v1alpha1.trainer.kubeflow.org"


def run_script(
    tmp_path: Path, codes: list[int], attempts: int = 3
) -> subprocess.CompletedProcess[str]:
    """Run the restart script with a command that ends with these codes, one per start."""
    command = tmp_path / "command.sh"
    command.write_text('read -r code < codes; sed -i 1d codes; exit "$code"\n')
    (tmp_path / "codes").write_text("".join(f"{code}\n" for code in codes))
    return subprocess.run(
        ["/bin/sh", "-c", build_restart_script(attempts), "restart", "/bin/sh", str(command)],
        cwd=tmp_path,
        capture_output=True,
        encoding="utf-8",
        check=False,
    )


@pytest.mark.parametrize(
    ("codes", "code", "starts"),
    [
        ([0], 0, 1),
        ([75, 0], 0, 2),
        ([76, 75, 0], 0, 3),
        ([75, 75, 75, 0], 75, 3),
        ([2, 0], 2, 1),
        ([75, 64], 64, 2),
        ([143, 0], 143, 1),
        ([137, 0], 1, 1),
        ([139, 0], 1, 1),
    ],
)
def test_the_restart_script_decides_by_exit_code(
    tmp_path: Path, codes: list[int], code: int, starts: int
) -> None:
    """The operator restarts pods after codes from 128 on, so only 143 may be one of them."""
    done = run_script(tmp_path, codes)
    assert done.returncode == code
    assert (tmp_path / "codes").read_text().count("\n") == len(codes) - starts
    assert done.stderr.count("ended with exit code") == sum(
        item in {75, 76} for item in codes[:starts]
    )


def test_the_restart_script_passes_on_sigterm(tmp_path: Path) -> None:
    command = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(143)); "
    command += "open('started', 'w').close(); time.sleep(60)"
    script = build_restart_script(3)
    process = subprocess.Popen(
        ["/bin/sh", "-c", script, "restart", sys.executable, "-c", command], cwd=tmp_path
    )
    try:
        assert timing.wait_for((tmp_path / "started").exists, 20, poll_seconds=0.01)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 143
    finally:
        process.kill()
        process.wait()


def test_shellcheck_accepts_the_restart_script(tmp_path: Path) -> None:
    path = tmp_path / "restart.sh"
    path.write_text("#!/bin/sh\n" + build_restart_script(3))
    shellcheck = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([shellcheck, path], capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stdout


def build_pod(phase: str, index: int = 0, **status: Any) -> dict[str, Any]:
    """Return a pod of a PyTorchJob."""
    role, number = ("worker", index - 1) if index else ("master", 0)
    labels = {
        "training.kubeflow.org/replica-type": role,
        "training.kubeflow.org/replica-index": str(number),
    }
    metadata = {"name": f"llama-{role}-{number}", "labels": labels}
    return {"metadata": metadata, "spec": {}, "status": {"phase": phase, **status}}


def build_job(*conditions: str, **metadata: Any) -> dict[str, Any]:
    """Return a PyTorchJob of two nodes with these conditions."""
    items = [{"type": kind, "status": "True", "message": f"is {kind}"} for kind in conditions]
    document = find_document(build_plan(replace(ELASTIC, min_nodes=2)), "PyTorchJob")
    document = {**document, "metadata": {**document["metadata"], **metadata}}
    return {**document, "status": {"conditions": items}}


def wait_for(reason: str, message: str = "") -> dict[str, Any]:
    """Return the status of a pod whose container waits."""
    waiting = {"waiting": {"reason": reason, "message": message}}
    return {"containerStatuses": [{"image": "r.example/a:1", "state": waiting}]}


def end(code: int, message: str = "", reason: str = "Error") -> dict[str, Any]:
    """Return the status of a pod whose container has ended."""
    terminated = {"exitCode": code, "message": message, "reason": reason}
    return {"containerStatuses": [{"state": {"terminated": terminated}}]}


NO_ROOM = {"message": "0/4 nodes are available: 4 Insufficient nvidia.com/gpu."}
UNSCHEDULABLE = {"conditions": [{"type": "PodScheduled", "status": "False", **NO_ROOM}]}
PREEMPTION = {"reason": "PreemptionByScheduler", "message": "preempting for a higher priority pod"}
DISRUPTED = {"conditions": [{"type": "DisruptionTarget", "status": "True", **PREEMPTION}]}
QUOTA = {
    "reason": "FailedCreate",
    "message": "pods 'x' is forbidden: exceeded quota: gpus, requested: requests.nvidia.com/gpu=8,"
    " used: requests.nvidia.com/gpu=60, limited: requests.nvidia.com/gpu=64",
}


@pytest.mark.parametrize(
    ("conditions", "pods", "state", "reason"),
    [
        ("Succeeded", [], "succeeded", ""),
        ("Failed", [], "failed", "is Failed"),
        ("Created", [], "pending", "operator of a PyTorchJob runs"),
        ("", [build_pod("Pending", **UNSCHEDULABLE)], "pending", "no node has room: 0/4 nodes are"),
        (
            "",
            [build_pod("Pending", **wait_for("ImagePullBackOff", "no"))],
            "pending",
            "the image r.example/a:1 cannot be pulled: no",
        ),
        (
            "",
            [build_pod("Pending", **wait_for("CreateContainerConfigError", "no secret hub"))],
            "pending",
            "the container cannot be created: no secret hub",
        ),
        ("", [build_pod("Pending", **wait_for("ContainerCreating"))], "starting", "created"),
        ("Running", [build_pod("Running"), build_pod("Running", 1)], "running", ""),
        ("Running", [build_pod("Running")], "starting", ""),
        ("Restarting", [build_pod("Running"), build_pod("Pending", 1)], "restarting", ""),
        ("", [build_pod("Failed", **DISRUPTED)], "preempted", "PreemptionByScheduler"),
    ],
)
def test_the_state_follows_from_conditions_and_pods(
    conditions: str, pods: list[dict[str, Any]], state: str, reason: str
) -> None:
    status = describe_job(HANDLE, JobObjects(build_job(*conditions.split()), pods))
    assert status.state == state
    assert reason in status.reason
    assert status.usd_per_hour == pytest.approx(4 * 27.447)


@pytest.mark.parametrize("context", ["here", "arn:aws:eks:us-east-1:111122223333:cluster/team-a"])
def test_a_shell_is_that_of_the_first_pod_that_runs(context: str) -> None:
    handle = Handle.parse(f"kubernetes://{context}/default/pytorchjob/llama")
    pods = [build_pod("Pending"), build_pod("Running", 1), build_pod("Running", 2)]
    for pod in pods:
        pod["metadata"]["namespace"] = "team"
    status = describe_job(handle, JobObjects(build_job("Running"), pods))
    options = f"--context={context} --namespace=team"
    assert status.shell_command == f"kubectl {options} exec -it llama-worker-0 -- bash"
    assert describe_job(HANDLE, JobObjects(build_job("Failed"), pods[:1])).shell_command == ""


def test_a_quota_and_a_cancellation_are_reasons() -> None:
    status = describe_job(HANDLE, JobObjects(build_job("Created"), [], [QUOTA]))
    assert status.state == "pending"
    assert "quota gpus: requests.nvidia.com/gpu=8 is requested" in status.reason
    job = build_job(annotations={"regauge/cancelled": "true"})
    status = describe_job(HANDLE, JobObjects(job, []))
    assert (status.state, status.reason) == ("cancelled", "cancelled by a user")


def test_a_failure_names_the_node_and_the_last_line_of_its_log() -> None:
    lines = "step 3\nregauge: data.path is missing; set data.path\n"
    pods = [build_pod("Failed", 0, **end(75)), build_pod("Failed", 1, **end(64, lines))]
    status = describe_job(HANDLE, JobObjects(build_job("Failed"), pods))
    assert status.exit_code == 64
    assert status.failure is not None
    assert (status.failure.kind, status.failure.node) == ("unknown", 1)
    assert status.failure.message == "regauge: data.path is missing; set data.path"
    killed = [build_pod("Failed", 0, **end(137, reason="OOMKilled"))]
    status = describe_job(HANDLE, JobObjects(build_job("Failed"), killed))
    assert status.failure is not None
    assert status.failure.kind == "memory"


def test_a_suspended_job_waits_in_its_queue() -> None:
    job = find_document(build_plan(ELASTIC, queue="research"), "PyTorchJob")
    job["spec"]["runPolicy"]["suspend"] = True
    assert describe_job(HANDLE, JobObjects(job, [])).reason == "the job waits in queue research"
    condition = {"type": "QuotaReserved", "status": "False", "message": "insufficient quota"}
    workload = {"metadata": {"name": "w"}, "status": {"conditions": [condition]}}
    status = describe_job(HANDLE, JobObjects(job, [], (), [workload]))
    assert (status.state, status.reason) == ("pending", "queue research: insufficient quota")


def test_a_log_of_an_unreachable_cluster_is_a_transient_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The messages of kubectl are longer than the buffer of a pipe."""
    program = tmp_path / "kubectl"
    message = "The connection to the server was refused"
    program.write_text(
        f"#!/bin/sh\necho one\nyes '{message}' | head -n 9999 >&2\necho two\nexit 1\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    lines = KubectlNamespace("eks", "default").stream("logs", "pod")
    assert [next(lines), next(lines)] == ["one", "two"]
    with pytest.raises(TransientError, match=f"'kubectl' cannot reach the server: {message}"):
        next(lines)
