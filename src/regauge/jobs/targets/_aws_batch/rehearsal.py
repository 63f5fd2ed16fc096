"""The processes that Batch starts for the requests on a job's nodes.

| variables | source |
| --- | --- |
| in every job | https://docs.aws.amazon.com/batch/latest/userguide/job_env_vars.html |
| in a multi-node job | https://docs.aws.amazon.com/batch/latest/userguide/mnp-env-vars.html |
"""

from __future__ import annotations

from typing import Any

from regauge.jobs.targets import LeaderAddress, NodeCommand


def build_node_commands(
    definition: dict[str, Any], request: dict[str, Any], leader: LeaderAddress
) -> list[NodeCommand]:
    """Return the process for each node or array job.

    The rendezvous port comes from `leader`; the main node lacks a variable with its own address.
    """
    nodes = definition.get("nodeProperties")
    size = request.get("arrayProperties", {}).get("size", 1)
    if nodes is None:
        container = definition["containerProperties"]
        array = {"AWS_BATCH_JOB_ARRAY_SIZE": str(size)} if size > 1 else {}
        variables = [
            array | ({"AWS_BATCH_JOB_ARRAY_INDEX": str(index)} if array else {})
            for index in range(size)
        ]
    else:
        container = nodes["nodeRangeProperties"][0]["container"]
        variables = [
            build_node_variables(index, nodes, leader.host) | {"MASTER_PORT": str(leader.port)}
            for index in range(nodes["numNodes"])
        ]
    document = {item["name"]: item["value"] for item in container["environment"]}
    attempt = {"AWS_BATCH_JOB_ID": leader.run_id, "AWS_BATCH_JOB_ATTEMPT": "1"}
    command = tuple(container["command"])
    return [
        NodeCommand(index, command, document | attempt | node)
        for index, node in enumerate(variables)
    ]


def build_node_variables(index: int, nodes: dict[str, Any], main_address: str) -> dict[str, str]:
    """Return a node's variables in a multi-node parallel job.

    Only child nodes get the main node's address.
    """
    main = nodes["mainNode"]
    variables = {
        "AWS_BATCH_JOB_MAIN_NODE_INDEX": str(main),
        "AWS_BATCH_JOB_NODE_INDEX": str(index),
        "AWS_BATCH_JOB_NUM_NODES": str(nodes["numNodes"]),
    }
    if index != main:
        variables["AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"] = main_address
    return variables
