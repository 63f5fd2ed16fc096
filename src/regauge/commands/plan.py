"""Plan a run before it starts: whether it fits, how long it takes, what it costs, and where.

For example:

    $ regauge plan run.toml --on p5.48xlarge:16
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from regauge import commands
from regauge.commands import _plan_text
from regauge.planner.run_plans.software import REGAUGE, use_software
from regauge.planner.search import training_plans
from regauge.planner.search.inference_plans import plan_inference, read_price
from regauge.planner.search.plan_options import DEFAULT_MAX_NODES, Machines, Purpose, refuse_options
from regauge.planner.search.select_machines import check_machines
from regauge.system.errors import SettingsError
from regauge.system.garbage import pause_collection


def main(  # noqa: PLR0913 - the flags of the command line
    subject: Annotated[
        Path, Parameter(help="Run file; for inference an artifact folder or a model folder.")
    ],
    *overrides: commands.Override,
    on: Annotated[
        str | None,
        Parameter(help="Machine type and count, such as p5.48xlarge:16, or chips: 8xA100."),
    ] = None,
    compare: Annotated[
        str | None, Parameter(help="Machine types to compare, such as p5.48xlarge:2,p4d.24xlarge.")
    ] = None,
    cheapest: Annotated[bool, Parameter(help="Search all machine types and settings.")] = False,
    deadline: Annotated[
        str | None, Parameter(help="Maximum run time, such as 7d, 12h or 90m.")
    ] = None,
    max_nodes: Annotated[int, Parameter(help="Maximum machines in a search.")] = DEFAULT_MAX_NODES,
    to_target: Annotated[
        Path | None, Parameter(help="A short run's folder: plan the time to stop.target.")
    ] = None,
    serve: Annotated[float | None, Parameter(help="Requests per second: plan a server.")] = None,
    predict: Annotated[int | None, Parameter(help="Number of texts: plan batch inference.")] = None,
    slo_ms: Annotated[
        float | None, Parameter(help="With --serve: milliseconds that a request may take.")
    ] = None,
    lengths: Annotated[
        Path | None, Parameter(help="With --serve, --predict: a prepared dataset with lengths.")
    ] = None,
    tokens: Annotated[int | None, Parameter(help="Tokens per text of a model folder.")] = None,
    new_tokens: Annotated[int | None, Parameter(help="Tokens to generate per text.")] = None,
    software: Annotated[
        str, Parameter(help="Plan another software: hf, liger, megatron, nemo, torchtitan.")
    ] = REGAUGE,
    stage: Annotated[
        str | None, Parameter(help="Stage of a pipeline's run file; by default the only one.")
    ] = None,
    probe: Annotated[
        bool, Parameter(help="Measure 20 steps on this machine first, and plan the run on it.")
    ] = False,
    show_all: Annotated[bool, Parameter(name="--all", help="List all options.")] = False,
    explain: Annotated[
        bool, Parameter(help="Print each formula with its numbers, and the nearest measured rows.")
    ] = False,
    json: commands.OutputFormat = commands.TEXT,
) -> dict[str, Any]:
    """Plan a run's memory, time and dollars without an accelerator, and rank machine types.

    Every prediction has p10 to p90. The network is not used, and only --probe computes.

    For example:

        >>> regauge.plan("run.toml", on="p5.48xlarge:16")
    """
    machines = Machines(on, compare, cheapest, deadline, max_nodes, probe, show_all)
    purpose = Purpose(to_target, serve, predict, slo_ms, lengths, tokens, new_tokens, software)
    with pause_collection():
        answer = _plan(subject, overrides, stage, machines, purpose, explain=explain)
    return _plan_text.show(answer, as_json=json.is_json)


def _plan(
    subject: Path,
    overrides: tuple[str, ...],
    stage: str | None,
    machines: Machines,
    purpose: Purpose,
    *,
    explain: bool,
) -> dict[str, Any]:
    if purpose.serve is not None or purpose.predict is not None or subject.is_dir():
        if purpose.software != REGAUGE:
            raise SettingsError("--software has no effect on this plan", "remove it")
        return plan_inference(subject, machines, purpose, read_price(overrides, stage))
    fields = ("slo_ms", "lengths", "tokens", "new_tokens")
    refuse_options(purpose, fields, "needs --serve or --predict", "add one of them")
    tables = training_plans.read_tables(subject, overrides, stage)
    request = use_software(training_plans.read_run(tables, subject), purpose.software)
    check_machines(machines)
    probes = training_plans.probe_machine(request, tables) if machines.probe else ()
    return training_plans.plan_run(request, machines, purpose.to_target, probes, explain=explain)
