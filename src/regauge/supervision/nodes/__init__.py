"""Attempts on several nodes: rendezvous, heartbeats between nodes, one decision for all.

Entry point: `interface.build_launcher`, which returns a `LocalLauncher` for one node or a
`RendezvousLauncher` for several. Each yields a `NodeGroup` per attempt. Only `rendezvous` imports
torch when it is loaded.
"""
