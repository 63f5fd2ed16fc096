"""Attempts on several nodes: rendezvous, heartbeats between nodes, one decision for all.

Entry points: `topology.resolve_topology` (the nodes in a run) and the two launchers,
`interface.LocalLauncher` for one node and `rendezvous.RendezvousLauncher` for several. Each yields
a `NodeGroup` per attempt.

| file | content |
| --- | --- |
| `interface` | `NodeGroup`, and its single-node case |
| `topology` | node count and rendezvous endpoint, from settings or a launcher |
| `rendezvous` | joins the nodes of each attempt with torch's dynamic rendezvous |
| `attempt_registry` | the newest attempt number, shared by all nodes |
| `coordinator` | exchange of plans, alarms and failures during an attempt |
| `heartbeats` | heartbeats between nodes |

Only `rendezvous` imports torch when it is loaded.
"""
