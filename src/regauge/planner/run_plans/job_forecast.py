"""Plan a job that is about to start, for `launch` and `train --dry-run`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from regauge.machines.catalog import find_instance
from regauge.machines.machine_rates import find_machine
from regauge.planner import run_history
from regauge.planner.run_plans import option_search
from regauge.planner.run_plans.plan_document import describe_forecast
from regauge.planner.run_plans.run_request import read_request
from regauge.supervision.settings import parse_node_range
from regauge.system.errors import RegaugeError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def forecast_job(
    tables: Mapping[str, Any], run_file: Path, instance: str | None, nodes: int | str | None
) -> dict[str, Any]:
    """Return the planner's memory, step time, hours and dollars for a training run.

    `nodes` is a machine count, or a range such as `2:4`, whose maximum is planned. The result is
    empty without a machine type with accelerators, as the planner does not know CPU speeds. It has
    `unknown`, the reason, if the run cannot be planned.
    """
    if instance is None or not find_instance(instance).chips:
        return {}
    _, count = parse_node_range(nodes or 1)
    try:
        request = read_request(tables, run_file)
        price = request.run.execution.price
        machine = option_search.apply_price(find_machine(instance), price)
        if price.usd_per_hour is not None:
            machine = replace(machine, usd_per_hour=price.usd_per_hour)
        machine = option_search.use_processes(request, machine)
        job = option_search.place_job(request, machine, count)
        runs = run_history.load_history()
        return describe_forecast(option_search.plan_option(request, job, machine, count, runs))
    except RegaugeError as error:
        return {"unknown": error.problem}
