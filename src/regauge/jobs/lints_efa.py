"""EFA (Elastic Fabric Adapter) checks: machine interfaces, requests and variables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from regauge.jobs.lints import Check, Lint, find_images, walk
from regauge.jobs.targets import LaunchPlan

RESOURCE = "vpc.amazonaws.com/efa"
"""Resource name used by the EFA device plugin for Kubernetes."""
DEVICE = "/dev/infiniband/uverbs"
"""EFA device file prefix."""
VARIABLE_PREFIX = "FI_"
PROVIDER = "efa"
"""FI_PROVIDER value in libfabric."""
COUNT_SOURCE = "https://github.com/aws/sagemaker-hyperpod-cli/issues/367"
REQUEST_SOURCE = "https://github.com/aws/sagemaker-hyperpod-cli/issues/306"
VARIABLE_SOURCE = "https://docs.aws.amazon.com/eks/latest/userguide/node-efa.html"


def check_count(plan: LaunchPlan) -> Iterator[Lint]:
    """Report requests for more or fewer interfaces than the machine has."""
    machine = plan.job.machine
    if machine is None:
        return
    for count in sorted(_list_requests(plan)):
        if count == machine.efa_interfaces:
            continue
        fact = f"has {machine.efa_interfaces}" if machine.efa_interfaces else "has no EFA"
        yield Lint(
            "efa-count",
            f"a document requests {count} EFA interfaces, and {machine.name} {fact}",
            f"request {machine.efa_interfaces}, or correct launch.instance",
            COUNT_SOURCE,
        )


def check_request(plan: LaunchPlan) -> Iterator[Lint]:
    """Report nodes that could use EFA and do not request it: NCCL would use TCP."""
    job, machine = plan.job, plan.job.machine
    if machine is None or not job.uses_efa or not find_images(plan) or _list_requests(plan):
        return
    yield Lint(
        "efa-request",
        f"{job.max_nodes} nodes of {machine.name} request none of its EFA interfaces",
        f"request {machine.efa_interfaces} in the settings of the target",
        REQUEST_SOURCE,
    )


def check_variables(plan: LaunchPlan) -> Iterator[Lint]:
    """Report variables that select EFA in containers, or on a machine, without it."""
    job, machine = plan.job, plan.job.machine
    names = [name for name, value in job.environment.items() if _selects_efa(name, value)]
    if not names:
        return
    if machine is not None and not machine.efa_interfaces:
        problem = f"launch.environment.{names[0]} selects EFA, and {machine.name} has none"
        yield Lint("efa-variable", problem, "remove the variable", VARIABLE_SOURCE)
    elif find_images(plan) and not _list_requests(plan):
        problem = f"launch.environment.{names[0]} selects EFA, and no document requests a device"
        remedy = "remove the variable, or set launch.instance to a machine with EFA"
        yield Lint("efa-variable", problem, remedy, VARIABLE_SOURCE)


def _selects_efa(name: str, value: str) -> bool:
    """Return whether a libfabric variable selects or configures EFA."""
    is_provider = name == f"{VARIABLE_PREFIX}PROVIDER" and value == PROVIDER
    return is_provider or name.startswith(f"{VARIABLE_PREFIX}EFA_")


def _list_requests(plan: LaunchPlan) -> set[int]:
    """Return the EFA interface counts requested by the documents' containers."""
    counts: set[int] = set()
    devices: Counter[str] = Counter()
    for document in plan.documents:
        for path, value in walk(document.content):
            if path.endswith(RESOURCE):
                counts.add(int(value))
            elif path.endswith(".hostPath") and str(value).startswith(DEVICE):
                devices[f"{document.name} {path.rpartition('[')[0]}"] += 1
    return counts | set(devices.values())


CHECKS: tuple[Check, ...] = (check_count, check_request, check_variables)
