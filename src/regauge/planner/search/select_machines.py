"""Reads the machines in `--on` and `--compare`, and the deadline, for the verb `plan`."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from regauge.machines.catalog import find_by_chips, load_instances
from regauge.machines.machine_rates import find_machine
from regauge.planner.run_history import LOCAL, find_local_machine, find_local_precision
from regauge.planner.run_plans import option_search
from regauge.planner.search.plan_options import DEFAULT_MAX_NODES
from regauge.supervision.settings import parse_node_range
from regauge.system.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from regauge.machines.machine_rates import MachineRates
    from regauge.planner.anchors import Anchor
    from regauge.planner.run_plans.run_request import TrainingRequest
    from regauge.planner.search.plan_options import Machines

HOURS = {"d": 24.0, "h": 1.0, "m": 1 / 60, "s": 1 / 3600}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)([dhms])")
_MACHINES = re.compile(r"([^:\s]+)(?::(\d+))?")


def check_machines(machines: Machines) -> None:
    """Raise SettingsError for options that exclude each other."""
    names = [name for name in ("on", "compare", "cheapest") if getattr(machines, name)]
    if len(names) > 1:
        problem = f"--{names[0]} and --{names[1]} contradict each other"
        raise SettingsError(problem, "use one of them")
    others = [name for name in names if getattr(machines, name) != LOCAL]
    if machines.probe and others:
        problem = f"--probe measures this machine, not --{others[0]}"
        raise SettingsError(problem, "remove one of them")
    for option, is_set in (
        ("--max-nodes", machines.max_nodes != DEFAULT_MAX_NODES),
        ("--all", machines.show_all),
    ):
        if is_set and not machines.cheapest:
            raise SettingsError(f"{option} has no effect without --cheapest", "remove it")
    if machines.max_nodes < 1:
        raise SettingsError(f"--max-nodes {machines.max_nodes} is below 1", "allow a machine")
    if machines.deadline is not None:
        parse_hours(machines.deadline)


def parse_hours(text: str) -> float:
    """Return the hours in a duration such as `7d`, `12h`, `90m`; raises SettingsError."""
    match = _DURATION.fullmatch(text)
    if match is None or float(match[1]) == 0:
        raise SettingsError(f"--deadline {text} is not a duration", "write it as 7d, 12h or 90m")
    return float(match[1]) * HOURS[match[2]]


def select_machines(
    request: TrainingRequest, machines: Machines, runs: Sequence[Anchor] = ()
) -> list[tuple[MachineRates, int]]:
    """Return the requested machine types with counts; `local` comes from measured runs.

    Chips, such as 8xA100, are all machine types that have them. Without an option the run file
    decides. Raises SettingsError for an unknown type.
    """
    execution = request.run.execution
    key = "--on" if machines.on else "--compare"
    text = LOCAL if machines.probe else machines.on or machines.compare
    if text is None:
        name = execution.price.instance
        if name is None:
            problem = "the plan needs a machine type, and the run file has none"
            raise SettingsError(problem, "write --on p5.48xlarge:2, --compare, or --cheapest")
        _, count = parse_node_range(execution.nodes.count or 1)
        key, text = "execution.price.instance", f"{name}:{count}"
    names = expand_chips(text)
    return [
        (_find_local(request, runs), 1) if name == LOCAL else _parse_machines(name, key, request)
        for name in names
    ]


def expand_chips(text: str) -> list[str]:
    """Return the machine types in a list, and for chips, such as 8xA100, all types with them."""
    names: list[str] = []
    for item in text.split(","):
        name, colon, count = item.strip().partition(":")
        types = [name] if name in load_instances() else find_by_chips(name) or [name]
        names += [f"{machine_type}{colon}{count}" for machine_type in types]
    return names


def _find_local(request: TrainingRequest, runs: Sequence[Anchor]) -> MachineRates:
    """Return this machine with the run file's processes, and with the configured price.

    With `execution.processes = "auto"` it has the latest measured run's devices.
    """
    execution = request.run.execution
    processes = execution.processes
    if processes == "auto":
        local = [run for run in runs if run.machine is not None]
        processes = local[-1].features.devices if local else 1
    precision: str = request.job.precision
    if execution.precision == "auto":
        precision = find_local_precision(runs)
    machine = find_local_machine(runs, processes, precision)
    return replace(machine, usd_per_hour=execution.price.usd_per_hour)


def _parse_machines(text: str, key: str, request: TrainingRequest) -> tuple[MachineRates, int]:
    match = _MACHINES.fullmatch(text)
    if match is None or match[2] == "0":
        problem = f"{key}: '{text}' is not a machine type with a count"
        raise SettingsError(problem, "write it as p5.48xlarge:16")
    price = request.run.execution.price
    machine = option_search.apply_price(find_machine(match[1], key), price)
    if price.usd_per_hour is not None and price.instance in (None, machine.name):
        machine = replace(machine, usd_per_hour=price.usd_per_hour)
    return machine, int(match[2] or 1)
