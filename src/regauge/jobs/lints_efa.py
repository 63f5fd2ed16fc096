"""EFA (Elastic Fabric Adapter) checks: machine interfaces, requests and variables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from regauge.jobs.lints import Check, Lint, build_lint, find_images, walk
from regauge.jobs.targets import LaunchPlan

RESOURCE = "vpc.amazonaws.com/efa"
"""Resource name used by the EFA device plugin for Kubernetes."""
DEVICE = "/dev/infiniband/uverbs"
"""EFA device file prefix."""


def check_requests(plan: LaunchPlan) -> Iterator[Lint]:
    """Report requests for more or fewer interfaces than the machine has.

    Nodes that do not request their interfaces are reported, too: NCCL would use TCP.
    """
    job, machine, counts = plan.job, plan.job.machine, _list_requests(plan)
    if machine is None:
        return
    interfaces = machine.efa_interfaces
    for count in sorted(counts - {interfaces}):
        values = {"machine": machine.name, "interfaces": interfaces}
        yield build_lint("efa-count", count=count, **values)
    if job.uses_efa and find_images(plan) and not counts:
        values = {"machine": machine.name, "interfaces": interfaces}
        yield build_lint("efa-request", nodes=job.max_nodes, **values)


def check_variables(plan: LaunchPlan) -> Iterator[Lint]:
    """Report variables that select EFA in containers, or on a machine, without it.

    Only training communicates, and one run file describes the jobs of several verbs.
    """
    job, machine = plan.job, plan.job.machine
    names = [name for name, value in job.environment.items() if _selects_efa(name, value)]
    if not names or job.verb != "train":
        return
    problem, remedy = "", "remove the variable"
    if machine is not None and not machine.efa_interfaces:
        problem = f"{machine.name} has none"
    elif find_images(plan) and not _list_requests(plan):
        problem = "no document requests a device"
        remedy = "remove the variable, or set launch.instance to a machine with EFA"
    if problem:
        yield build_lint("efa-variable", name=names[0], problem=problem, remedy=remedy)


def _selects_efa(name: str, value: str) -> bool:
    return (name, value) == ("FI_PROVIDER", "efa") or name.startswith("FI_EFA_")


def _list_requests(plan: LaunchPlan) -> set[int]:
    counts: set[int] = set()
    devices: Counter[str] = Counter()
    for document in plan.documents:
        for path, value in walk(document.content):
            if path.endswith(RESOURCE):
                counts.add(int(value))
            elif path.endswith(".hostPath") and str(value).startswith(DEVICE):
                devices[f"{document.name} {path.rpartition('[')[0]}"] += 1
    return counts | set(devices.values())


CHECKS: tuple[Check, ...] = (check_requests, check_variables)
