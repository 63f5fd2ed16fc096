"""Reads environment variables that AWS Batch sets in a container.

Names follow the AWS Batch user guide, "AWS Batch job environment variables" and "Environment
variables" of multi-node parallel jobs: https://docs.aws.amazon.com/batch/latest/userguide/.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from regauge.system.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Mapping

NUM_NODES = "AWS_BATCH_JOB_NUM_NODES"
"""Set in multi-node parallel jobs only."""
UNUSED_ADDRESS = ("192.0.2.1", 9)
"""Address without a machine (RFC 5737), so the route to it is the default route."""


def is_multi_node(environment: Mapping[str, str]) -> bool:
    """Return whether this container is a node in a multi-node parallel job."""
    return NUM_NODES in environment


def read_main_address(environment: Mapping[str, str]) -> str:
    """Return the main node's address, which Batch sets on the child nodes only.

    Raises SettingsError on a child node without this variable.
    """
    address = environment.get("AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS")
    if address:
        return address
    index = environment.get("AWS_BATCH_JOB_NODE_INDEX")
    if index != environment.get("AWS_BATCH_JOB_MAIN_NODE_INDEX", "0"):
        problem = f"AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS is not set on node {index}"
        raise SettingsError(problem, "set execution.nodes.endpoint")
    return find_local_address()


def find_local_address() -> str:
    """Return this machine's address on its default route; does not send a packet."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(UNUSED_ADDRESS)
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostbyname(socket.gethostname())


def read_attempt_name(environment: Mapping[str, str]) -> str | None:
    """Return the name of this attempt, the same on all nodes; None outside a job.

    A child job's identifier has a suffix, such as `#1`.
    """
    job_id = environment.get("AWS_BATCH_JOB_ID")
    if not job_id:
        return None
    return f"{job_id.partition('#')[0]}-{environment.get('AWS_BATCH_JOB_ATTEMPT', '1')}"


def read_array_size(environment: Mapping[str, str]) -> int | None:
    """Return the number of jobs in the array; None outside an array."""
    return _read_number(environment, "AWS_BATCH_JOB_ARRAY_SIZE")


def read_array_index(environment: Mapping[str, str]) -> int | None:
    """Return this job's index in the array, from 0; None outside an array."""
    return _read_number(environment, "AWS_BATCH_JOB_ARRAY_INDEX")


def _read_number(environment: Mapping[str, str], name: str) -> int | None:
    value = environment.get(name)
    if value is None:
        return None
    if not value.isdigit():
        raise SettingsError(
            f"{name} = '{value}' is not a number", "set predict.job_index and job_count"
        )
    return int(value)
