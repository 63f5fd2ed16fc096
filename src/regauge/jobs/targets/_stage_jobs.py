"""A pipeline's jobs: joins their plans, submits them in order, and joins their states."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from regauge.jobs.targets import Document, Handle, JobSpec, JobStatus, LaunchPlan, StageState

NOTE = "Until the submission, a dependency has the name of a job in place of its id."
RULE = "A stage starts after the success of the one before it; a failure ends the pipeline."


def join_plans(
    job: JobSpec, stages: tuple[LaunchPlan, ...], shared: Collection[str] = ()
) -> LaunchPlan:
    """Return a pipeline's plan, with the job name as each document's name prefix.

    Documents with a name in `shared` come from the stage with the most nodes.
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
    """Submit a pipeline's stages; return the last one's handle.

    `submit` gets a plan and the earlier stages' handles. If it fails, `withdraw` removes these
    stages' jobs, last one first.
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


def join_statuses(handle: Handle, stages: Sequence[tuple[str, JobStatus]]) -> JobStatus:
    """Return a pipeline's status: the current stage, with all stages' states.

    The current stage is the first unfinished one. If all have ended, it is the first one that did
    not succeed. `stages` has each stage's name and status.
    """
    resolved = _mark_skipped(stages)
    current = next(
        (item for item in resolved if not item[1].is_final),
        next((item for item in resolved if item[1].state != "succeeded"), resolved[-1]),
    )
    name, status = current
    statuses = [status for _, status in resolved]
    failure = status.failure
    if failure is not None:
        failure = replace(failure, message=f"stage '{name}': {failure.message}")
    is_final = all(item.is_final for item in statuses)
    starts = [item.started_at for item in statuses if item.started_at]
    ends = [item.finished_at for item in statuses if item.finished_at]
    return replace(
        status,
        handle=handle,
        reason=f"stage '{name}': {status.reason}" if status.reason else f"stage '{name}'",
        failure=failure,
        submitted_at=statuses[0].submitted_at,
        started_at=min(starts, default=None),
        finished_at=max(ends, default=None) if is_final else None,
        stages=tuple(
            StageState(name, item.state, str(item.handle), item.exit_code, item.reason)
            for name, item in resolved
        ),
    )


def _add_prefix(job: JobSpec, name: str) -> str:
    return name if name.startswith(f"{job.name}.") else f"{job.name}-{name}"


def _mark_skipped(stages: Sequence[tuple[str, JobStatus]]) -> list[tuple[str, JobStatus]]:
    """Return the stages; a stage that failed without an attempt after another one is cancelled."""
    resolved: list[tuple[str, JobStatus]] = []
    for name, status in stages:
        is_stopped = any(item.state in ("failed", "cancelled") for _, item in resolved)
        is_skipped = is_stopped and status.state == "failed" and status.attempt is None
        cancelled = replace(status, state="cancelled", exit_code=None, failure=None)
        resolved.append((name, cancelled if is_skipped else status))
    return resolved
