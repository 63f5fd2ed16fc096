"""Slurm: a job script for `sbatch`, with one task per node, requeue and resubmission.

Job state comes from the controller, or from accounting for an old job. Facts that Slurm does not
store, such as the price, are in the job's comment.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from regauge.jobs.targets import (
    COMMON_FIELDS,
    FINAL_STATES,
    Document,
    Handle,
    JobEvent,
    JobSpec,
    JobStatus,
    LaunchPlan,
    LeaderAddress,
    Leftover,
    LogRequest,
    NodeCommand,
    _slurm_client,
)
from regauge.jobs.targets._job_end import cancel_job, check_ended, list_output_leftovers
from regauge.jobs.targets._nodes import build_rendezvous_variables
from regauge.jobs.targets._secret_files import check_secret_files
from regauge.jobs.targets._slurm_jobs import SlurmRecord
from regauge.jobs.targets._slurm_logs import LogFolder, read_lines
from regauge.jobs.targets._slurm_script import (
    find_log_folder,
    list_options,
    list_stage_options,
    list_submit_options,
    read_command,
    read_environment,
    render_comment,
    render_script,
)
from regauge.jobs.targets._slurm_status import build_status
from regauge.jobs.targets._slurm_target import SlurmTarget
from regauge.jobs.targets._stage_jobs import join_plans, join_statuses, submit_stages
from regauge.jobs.targets._times import format_time
from regauge.system.errors import SettingsError
from regauge.system.log import logger
from regauge.system.units import SECONDS_PER_HOUR

USED = COMMON_FIELDS | {"jobs"}
SUBMIT = ("sbatch", "--parsable")
JOB_ID = re.compile(r"\d+(_\d+)?")
RESERVED = frozenset(
    {
        "array",
        "dependency",
        "kill-on-invalid-dep",
        "no-requeue",
        "nodes",
        "ntasks",
        "parsable",
        "wrap",
    }
)
"""Options set by Regauge, or that would change the script's meaning."""
EVENT_TIMES = {"SubmitTime": "submitted", "StartTime": "started", "EndTime": "ended"}
CANCEL_SECONDS = 90.0
"""Maximum wait for a cancelled job; Slurm's KillWait is 30 s by default."""


class Slurm(SlurmTarget):
    """A Slurm cluster whose nodes share the launching machine's file system."""

    supports_elastic: ClassVar[bool] = True
    supports_arrays: ClassVar[bool] = True
    supports_stages: ClassVar[bool] = True

    def plan(self, job: JobSpec) -> LaunchPlan:
        """Return the job script; `sbatch` reads it from standard input."""
        if job.stages:
            return join_plans(job, tuple(self.plan(stage) for stage in job.stages))
        self._check(job)
        submit = (*SUBMIT, *list_stage_options(job.after)) if job.after else SUBMIT
        name = f"{job.name}.sh"
        return LaunchPlan(
            job,
            documents=(Document(name, render_script(job, self)),),
            commands=(("mkdir", "-p", find_log_folder(job, self)), submit),
            notes=(f"sbatch reads {name} from its standard input", *self._list_notes(job)),
            restart_policy=self._describe_restarts(job),
            used=USED,
        )

    def _check(self, job: JobSpec) -> None:
        check_secret_files(job)
        if job.jobs > 1 and job.max_nodes > 1:
            problem = f"launch.jobs is {job.jobs}, and execution.nodes.count is {job.max_nodes}"
            raise SettingsError(problem, "remove one of them: a job of an array has one node")
        names = {name for name, _ in list_options(job, self)} | RESERVED
        if clashes := sorted(names & self.options.keys()):
            problem = f"launch.target.options has '{clashes[0]}', which Regauge sets"
            raise SettingsError(problem, "remove it, and use the other settings of the target")

    def _list_notes(self, job: JobSpec) -> Iterator[str]:
        if job.jobs > 1:
            yield f"an array of {job.jobs} jobs shares the records; each job restarts by itself"
        if job.is_elastic:
            yield (
                f"Slurm chooses {job.min_nodes} to {job.max_nodes} nodes at the start of each "
                "attempt; it adds no node to a running job"
            )
        if self.cpus is None:
            yield "the job has whole nodes, because no number of cores is set (cpus)"
        if job.after:
            yield "Slurm cancels a stage if the one before it fails (--kill-on-invalid-dep)"
        if self.requeue == "auto":
            yield (
                "a preempted job, or one at its time limit, saves and is requeued; this does not "
                "count as one of launch.max_attempts"
            )

    def _describe_restarts(self, job: JobSpec) -> str:
        if self.requeue == "never":
            return "the job ends after the loss of a node; submit it again to resume"
        restart = f"a new attempt resumes from the last checkpoint, until {job.max_attempts} failed"
        if job.is_elastic:
            return (
                f"the other nodes continue without a lost one, {job.min_nodes} at least; "
                f"otherwise {restart}"
            )
        return f"Slurm requeues the job, and {restart}"

    def list_node_commands(self, plan: LaunchPlan, leader: LeaderAddress) -> list[NodeCommand]:
        script = plan.documents[0].text
        variables = {**read_environment(script), **build_rendezvous_variables(plan.job, leader)}
        return [
            NodeCommand(node, read_command(script), variables) for node in range(plan.job.max_nodes)
        ]

    def submit(self, plan: LaunchPlan) -> Handle:
        _slurm_client.find_program("sbatch")
        partition = _slurm_client.find_partition(self.partition)
        limit_seconds = plan.job.limit_seconds
        if self.qos is None and limit_seconds and limit_seconds > partition.max_seconds:
            hours = partition.max_seconds / SECONDS_PER_HOUR
            problem = f"launch.hours is above the limit of partition {partition.name}"
            remedy = f"set it to at most {hours:g}: at the limit, the job saves and is requeued"
            raise SettingsError(problem, remedy)
        logger.info("%s", self._describe_preemption(partition))
        stages = [item.job.stage for item in plan.stages]

        def submit_script(item: LaunchPlan, earlier: list[Handle]) -> Handle:
            jobs = {stage: job.job_id for stage, job in zip(stages, earlier, strict=False)}
            options = list_submit_options(render_comment(item.job, self), jobs) if jobs else ()
            remedy = "correct [[launch.target]] of kind slurm"
            script = item.documents[0].text
            answer = _slurm_client.run_program(*SUBMIT, *options, text=script, remedy=remedy)
            return Handle(self.kind, partition.cluster, answer.strip().partition(";")[0])

        new_folders = _create_folders(Path(find_log_folder(plan.job, self)))
        try:
            if plan.stages:
                return submit_stages(plan, submit_script, lambda item: _stop_job(item.job_id))
            return submit_script(plan, [])
        except BaseException:
            for folder in reversed(new_folders):
                with suppress(OSError):
                    folder.rmdir()
            raise

    def _describe_preemption(self, partition: _slurm_client.SlurmPartition) -> str:
        preempt_mode = partition.preempt_mode
        mode = f"PreemptMode of partition {partition.name} is {preempt_mode}"
        if partition.preempt_type == "preempt/none" or "OFF" in preempt_mode:
            return f"{mode}: jobs are not preempted"
        if self.requeue == "never":
            return f"{mode}: a preempted job ends, because requeue is 'never'"
        if "REQUEUE" in preempt_mode:
            return f"{mode}: Slurm requeues a preempted job"
        if "CANCEL" in preempt_mode:
            return f"{mode}: a preempted job requeues itself"
        return f"{mode}: a preempted job is suspended, and continues later"

    def find_status(self, handle: Handle) -> JobStatus:
        """Return a job's state; a pipeline stage includes the earlier stages' states, too."""
        records = self._find_records(handle)
        record = records[0]
        if not record.earlier_stages:
            return _build_status(handle, records)
        names = [*record.earlier_stages, record.facts.get("stage", "")]
        jobs = [*record.earlier_stages.values(), handle.job_id]
        stages = [
            (name, self._find_stage(handle._replace(job_id=job), record, later))
            for name, job, later in zip(names, jobs, [*jobs[1:], ""], strict=True)
        ]
        return join_statuses(handle, stages)

    def _find_stage(self, handle: Handle, last: SlurmRecord, later: str) -> JobStatus:
        """Return the state of a stage, before the stage with the job `later`.

        Slurm forgets jobs. A forgotten stage has succeeded if a later one has run.
        """
        records = _slurm_client.read_records(handle.job_id)
        if records:
            return _build_status(handle, records)
        has_run = later and LogFolder(LogFolder.find(last).folder, later).count_attempts()
        reason = "Slurm has forgotten the job (MinJobAge)"
        return JobStatus(handle, "succeeded" if has_run else "unknown", reason)

    def _find_records(self, handle: Handle) -> list[SlurmRecord]:
        """Return a job's records, one per array job."""
        self._check_handle(handle)
        records = _slurm_client.read_records(handle.job_id)
        if not records:
            problem = f"Slurm does not know job {handle.job_id}: it forgets old jobs (MinJobAge)"
            raise SettingsError(problem, "correct the handle, or enable accounting")
        return records

    def _check_handle(self, handle: Handle) -> None:
        """Raise SettingsError for a handle from another target or cluster."""
        if handle.target != self.kind or not JOB_ID.fullmatch(handle.job_id):
            problem = f"{handle} is not a Slurm job handle"
            raise SettingsError(problem, "use the handle that `launch` printed: slurm://cluster/id")
        name = _slurm_client.read_config().get("ClusterName", "")
        if name != handle.context:
            problem = f"{handle} is a job of another cluster; this machine reaches '{name}'"
            raise SettingsError(problem, f"run the command on a login node of '{handle.context}'")

    def list_events(self, handle: Handle) -> list[JobEvent]:
        """Return times recorded by Slurm, and lines from the job script."""
        records, now = self._list_chain_records(handle), format_time(dt.datetime.now(dt.UTC))
        events: list[JobEvent] = []
        for record in records:
            *starts, end = (
                JobEvent(record.read_time(name) or "", "slurm", f"job {record.job_id} {text}")
                for name, text in EVENT_TIMES.items()
            )
            lines = LogFolder.find(record).read_events() if "logs" in record.facts else []
            events += [*starts, *lines, end]
        events = [event for event in events if event.source != "slurm" or "" < event.time <= now]
        return sorted(events, key=lambda event: event.time)

    def read_log(self, handle: Handle, request: LogRequest) -> Iterator[str]:
        """Yield the log of a rank's node; in an array, the rank is a job index.

        For a pipeline, this is the log from the last stage that has started.
        """
        records = self._find_records(handle)
        if records[0].earlier_stages:
            chain = self._list_chain_records(handle)
            started = [item for item in chain if LogFolder.find(item).count_attempts()]
            records = started[-1:] or chain[:1]
        record = records[0]
        if "ArrayTaskId" in record.fields:
            indices = {record.index: record for record in records}
            if (request.rank or 0) not in indices:
                problem = f"{handle} has no job {request.rank}"
                raise SettingsError(problem, f"set --rank to at most {max(indices)}")
            record, request = indices[request.rank or 0], request._replace(rank=None)

        def is_final() -> bool:
            return self.find_status(handle).is_final

        logs, num_nodes = LogFolder.find(record), record.num_nodes
        yield from read_lines(logs, request, is_final, num_nodes=num_nodes)

    def _list_chain_records(self, handle: Handle) -> list[SlurmRecord]:
        """Return records for a job and the earlier pipeline stages, oldest first."""
        records = self._find_records(handle)
        jobs = records[0].earlier_stages.values()
        return [*(item for job in jobs for item in _slurm_client.read_records(job)), *records]

    def cancel(self, handle: Handle) -> None:
        """Stop a job and earlier stages; wait until their processes have ended."""

        def stop(status: JobStatus) -> None:
            stages = (item for item in reversed(status.stages) if item.state not in FINAL_STATES)
            active = [Handle.parse(item.handle).job_id for item in stages]
            for job_id in active or [handle.job_id]:
                _stop_job(job_id)

        cancel_job(handle, self.find_status, stop, CANCEL_SECONDS)

    def clean_up(self, handle: Handle) -> list[Leftover]:
        """Remove logs from a job and its earlier stages; the output folder remains."""
        status, record = self.find_status(handle), self._find_records(handle)[0]
        check_ended(status)
        folder = LogFolder.find(record).folder
        for job in (*record.earlier_stages.values(), handle.job_id):
            for path in LogFolder(folder, job).list_files():
                path.unlink()
        with suppress(OSError):  # it has logs of other jobs
            folder.rmdir()
        return list_output_leftovers(status.output)


def _build_status(handle: Handle, records: list[SlurmRecord]) -> JobStatus:
    hosts = _slurm_client.list_hosts([record.node_list for record in records])
    return build_status(handle, records, hosts)


def _stop_job(job_id: str) -> None:
    _slurm_client.run_program("scancel", job_id, remedy="check the owner of the job")


def _create_folders(folder: Path) -> list[Path]:
    """Create a folder with its parents; return the new ones, outermost first."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return missing[::-1]
