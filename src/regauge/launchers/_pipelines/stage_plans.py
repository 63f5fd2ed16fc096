"""Joins the plans of the stages of a pipeline, and submits them one after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from regauge.launchers import Document, LaunchPlan

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from regauge.launchers import Handle, JobSpec

NOTE = "Until the submission, a dependency has the name of a job in place of its id."
RULE = "A stage starts after the success of the one before it; a failure ends the pipeline."


def join_plans(
    job: JobSpec, stages: tuple[LaunchPlan, ...], shared: Collection[str] = ()
) -> LaunchPlan:
    """Return the plan of a pipeline, in which a document has the name of its job as a prefix.

    Documents with a name in `shared` are those of the stage with the most nodes.
    """
    documents: list[Document] = []
    commands: list[tuple[str, ...]] = []
    for plan in stages:
        names = [item.name for item in plan.documents if item.name not in shared]
        renamed = {f"file://{name}": f"file://{_add_prefix(plan.job, name)}" for name in names}
        documents += [
            Document(_add_prefix(plan.job, item.name), item.content)
            for item in plan.documents
            if item.name in names
        ]
        commands += [tuple(renamed.get(word, word) for word in line) for line in plan.commands]
    largest = max(stages, key=lambda plan: plan.job.max_nodes)
    documents += [item for item in largest.documents if item.name in shared]
    notes = dict.fromkeys(note for plan in stages for note in plan.notes)
    return LaunchPlan(
        job,
        documents=tuple(documents),
        commands=tuple(dict.fromkeys(commands)),
        notes=(*notes, NOTE),
        restart_policy=f"{RULE} {largest.restart_policy}",
        used=largest.used,
        stages=stages,
    )


def submit_stages(
    plan: LaunchPlan,
    submit: Callable[[LaunchPlan, list[Handle]], Handle],
    withdraw: Callable[[Handle], object],
) -> Handle:
    """Submit the stages of a pipeline; return the handle of the last one.

    `submit` gets a plan and the handles of the stages before it. If it fails, `withdraw` removes
    the jobs of these stages, the last one first.
    """
    handles: list[Handle] = []
    try:
        for stage in plan.stages:
            handles.append(submit(stage, handles))
    except BaseException:
        for handle in reversed(handles):
            withdraw(handle)
        raise
    return handles[-1]


def _add_prefix(job: JobSpec, name: str) -> str:
    return name if name.startswith(f"{job.name}.") else f"{job.name}-{name}"
