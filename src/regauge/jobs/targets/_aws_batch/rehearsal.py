"""The processes of the requests, as Batch starts them on the nodes of a job.

| variables | source |
| --- | --- |
| of every job | https://docs.aws.amazon.com/batch/latest/userguide/job_env_vars.html |
| of a multi-node job | https://docs.aws.amazon.com/batch/latest/userguide/mnp-env-vars.html |
"""

from __future__ import annotations

from typing import Any

from regauge.jobs.targets import LeaderAddress, NodeCommand


def build_node_commands(
    definition: dict[str, Any], request: dict[str, Any], leader: LeaderAddress
) -> list[NodeCommand]:
    """Return the process of each node, or of each job of an array.

    The port of the rendezvous is that of `leader`; the main node has no variable with its address.
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
    """Return the variables of a node of a multi-node parallel job.

    Only the child nodes have the address of the main node.
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
