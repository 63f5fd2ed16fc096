"""Runs a Ray cluster of two nodes on this machine until standard input ends.

python tests/faults/ray_cluster.py
"""

from __future__ import annotations

import sys

from ray.cluster_utils import Cluster

NODE = {"num_cpus": 1, "object_store_memory": 100 * 2**20, "include_dashboard": False}

if __name__ == "__main__":
    cluster = Cluster(initialize_head=True, head_node_args=NODE)
    cluster.add_node(num_cpus=1, object_store_memory=NODE["object_store_memory"])
    cluster.wait_for_nodes()
    sys.stdout.write(f"{cluster.address}\n")
    sys.stdout.flush()
    sys.stdin.read()
    cluster.shutdown()
