"""AWS Batch: containers, arrays and multi-node parallel jobs on managed EC2 machines.

`plan` builds the API requests. `submit` sends RegisterJobDefinition and SubmitJob. The machines and
the queue are a CloudFormation stack, which `plan` prints.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar

from regauge.jobs.targets import (
    COMMON_FIELDS,
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
)
from regauge.jobs.targets._aws_batch.container import require_machine
from regauge.jobs.targets._aws_batch.documents import (
    DEFINITION_FILE,
    SUBMIT_FILE,
    TAG_PREFIX,
    build_job_definition,
    build_node_commands,
    build_submit_request,
)
from regauge.jobs.targets._aws_batch.jobs import (
    REGION_KEY,
    BatchRegion,
    find_log_stream,
    read_stream,
    select_child,
)
from regauge.jobs.targets._aws_batch.settings import BatchSettings, BatchStack
from regauge.jobs.targets._aws_batch.stack import build_stack
from regauge.jobs.targets._aws_batch.status import (
    build_status,
    find_started,
    is_final,
    list_job_events,
)
from regauge.jobs.targets._stage_jobs import join_plans, join_statuses, submit_stages
from regauge.machines.aws_client import AwsClient
from regauge.system.errors import RESTART_CODES, SettingsError

USED = COMMON_FIELDS | {"jobs", "image", "volumes", "shared_memory_gib"}
"""Job fields contained in the requests, or set by the run file that they contain."""


class AwsBatch(BatchSettings):
    """AWS Batch on EC2: one container per node."""

    supports_arrays: ClassVar[bool] = True
    supports_stages: ClassVar[bool] = True
    peer_names: ClassVar[tuple[str, ...]] = ("batch",)

    def plan(self, job: JobSpec) -> LaunchPlan:
        """Return the requests for a job, and for the stack if the settings contain one."""
        queue = self.queue or (self.stack.name if self.stack else None)
        if queue is None:
            remedy = "set it, or describe a stack, in [[launch.target]] of kind aws-batch"
            raise SettingsError("target 'aws-batch' needs a queue", remedy)
        if job.stages:
            return self._plan_stages(job)
        require_machine(job)
        definition = build_job_definition(job, self)
        request = build_submit_request(job, self, queue)
        documents = [Document(DEFINITION_FILE, definition), Document(SUBMIT_FILE, request)]
        notes = [_describe_type(job)]
        if self.stack is not None:
            stack = build_stack(job, self, self.stack)
            documents += [Document(name, content) for name, content in stack.items()]
            notes += self._describe_stack(self.stack, job)
        return LaunchPlan(
            job,
            documents=tuple(documents),
            commands=(
                self._build_command("register-job-definition", DEFINITION_FILE),
                self._build_command("submit-job", SUBMIT_FILE),
            ),
            notes=tuple(notes),
            restart_policy=_describe_restarts(job),
            used=USED | ({"spot"} if self.stack is not None else set()),
        )

    def _plan_stages(self, job: JobSpec) -> LaunchPlan:
        machines = sorted({stage.machine.name for stage in job.stages if stage.machine})
        if self.stack is not None and len(machines) > 1:
            problem = f"the stack has one machine type, and the stages use {', '.join(machines)}"
            raise SettingsError(problem, "set launch.instance, or name a queue instead of a stack")
        plans = tuple(self.plan(stage) for stage in job.stages)
        per_stage = {DEFINITION_FILE, SUBMIT_FILE}
        shared = {item.name for plan in plans for item in plan.documents} - per_stage
        return join_plans(job, plans, shared)

    def _build_command(self, operation: str, file: str) -> tuple[str, ...]:
        region = ("--region", self.region)
        return ("aws", "batch", operation, *region, "--cli-input-json", f"file://{file}")

    def _describe_stack(self, stack: BatchStack, job: JobSpec) -> list[str]:
        command = (
            f"aws cloudformation deploy --region {self.region} --stack-name {stack.name} "
            "--template-file batch-stack.json --capabilities CAPABILITY_NAMED_IAM"
        )
        notes = [f"Create the queue once, before the first job: {command}."]
        limit = f"{stack.pending_minutes} minutes"
        notes.append(f"Batch cancels a job that finds no capacity within {limit}.")
        if job.spot:
            notes.append("The price is that of on-demand machines; Spot machines cost less.")
        return notes

    def list_node_commands(self, plan: LaunchPlan, leader: LeaderAddress) -> list[NodeCommand]:
        contents = {document.name: document.content for document in plan.documents}
        return build_node_commands(contents[DEFINITION_FILE], contents[SUBMIT_FILE], leader)

    def submit(self, plan: LaunchPlan) -> Handle:
        """Register the job definition and submit the job; a refused job leaves nothing behind."""
        with BatchRegion(self.region) as region:

            def submit_job(plan: LaunchPlan, earlier: list[Handle]) -> Handle:
                contents = {document.name: document.content for document in plan.documents}
                previous = earlier[-1].job_id if earlier else None
                requests = contents[DEFINITION_FILE], contents[SUBMIT_FILE]
                return Handle(self.kind, self.region, region.submit(*requests, previous))

            if plan.stages:
                return submit_stages(plan, submit_job, lambda item: region.withdraw(item.job_id))
            return submit_job(plan, [])

    def find_status(self, handle: Handle) -> JobStatus:
        with BatchRegion(handle.context) as region:
            stages = [
                (
                    detail.get("tags", {}).get(f"{TAG_PREFIX}stage", ""),
                    build_status(_select(handle, detail), detail, region.describe_children(detail)),
                )
                for detail in region.describe_chain(handle.job_id)
            ]
        return join_statuses(handle, stages) if len(stages) > 1 else stages[0][1]

    def list_events(self, handle: Handle) -> list[JobEvent]:
        with BatchRegion(handle.context) as region:
            chain = region.describe_chain(handle.job_id)
        return sorted(event for detail in chain for event in list_job_events(detail))

    def read_log(self, handle: Handle, request: LogRequest) -> Iterator[str]:
        """Yield a log: the main node's, a rank's node's, or one array job's.

        For a pipeline, this is the log from the last stage that has started.
        """
        address = handle.context
        with BatchRegion(address) as region, AwsClient("logs", address, REGION_KEY) as logs:
            chain = region.describe_chain(handle.job_id)
            job_id = select_child(find_started(chain), request.rank)
            group, stream = find_log_stream(region.describe(job_id), request.attempt)
            describe = partial(region.describe, job_id) if request.follow else None
            yield from read_stream(logs, group, stream, describe=describe)

    def cancel(self, handle: Handle) -> None:
        """Cancel a queued job or terminate a running one, with a pipeline's earlier stages."""
        with BatchRegion(handle.context) as region:
            active = [item for item in region.describe_chain(handle.job_id) if not is_final(item)]
            for detail in reversed(active):
                region.cancel(_select(handle, detail))
            if not active:
                region.cancel(handle)  # raises the error of a job that has ended

    def clean_up(self, handle: Handle) -> list[Leftover]:
        """Deregister the job definition, and list the existing queue and machines."""
        with BatchRegion(handle.context) as region:
            chain = region.describe_chain(handle.job_id)
            jobs = [_select(handle, detail) for detail in reversed(chain)]
            return list(dict.fromkeys(item for job in jobs for item in region.clean_up(job)))


def _select(handle: Handle, detail: dict[str, Any]) -> Handle:
    return handle._replace(job_id=str(detail["jobId"]))


def _describe_type(job: JobSpec) -> str:
    if job.max_nodes > 1:
        return (
            f"The job is a multi-node parallel job with {job.max_nodes} nodes of one machine type; "
            "it does not offer Spot machines."
        )
    if job.jobs > 1:
        return f"The job is an array of {job.jobs} jobs; each has an index and one node."
    return "The job is one container on one machine."


def _describe_restarts(job: JobSpec) -> str:
    codes = ", ".join(str(code) for code in RESTART_CODES)
    rule = (
        f"after the loss of its machine or exit code {codes}, at most {job.max_attempts} attempts"
    )
    if job.max_nodes > 1:
        return (
            f"Batch restarts all nodes if the main node ends: {rule}. "
            "The loss of another node ends the main node with exit code 75."
        )
    return f"Batch restarts the job {rule}; every other exit code ends it."
