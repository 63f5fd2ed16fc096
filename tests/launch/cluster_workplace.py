"""A folder whose commands of Regauge submit jobs to a small cluster."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.kubernetes_api import ApiServer
from launch.training_jobs import Answer, Workplace


@dataclass
class ClusterWorkplace(Workplace):
    """A workplace whose commands use a cluster."""

    cluster: ApiServer | None = None

    @property
    def environment(self) -> dict[str, str]:
        assert self.cluster is not None
        return {**os.environ, "KUBECONFIG": str(self.cluster.kubeconfig)}

    def write_job(self, name: str, launch: dict[str, Any] | None = None, **changes: Any) -> Path:
        """Write a run file with the table [launch], whose pods mount this folder."""
        path = self.write_run(name, **changes)
        root = str(self.root)
        volume = {"name": "files", "kind": "host", "mount": root, "source": root}
        table = {"image": "registry.example/regauge:1", "volumes": [volume], **(launch or {})}
        path.write_text(json.dumps({**json.loads(path.read_text()), "launch": table}))
        return path

    def submit(self, run_file: Path, *arguments: str, verb: str = "train") -> str:
        return self.launch(run_file, verb, *arguments, "--on", "kubernetes")

    def try_submit(self, run_file: Path, *arguments: str, verb: str = "train") -> Answer:
        """Submit a job that may be refused."""
        command = ("launch", str(run_file), verb, *arguments, "--on", "kubernetes", "-o", "json")
        return self.run(*command)

    def assert_succeeds(self, handle: str) -> dict[str, Any]:
        """Wait for a job and return its last status."""
        answer = self.run("job", "wait", handle, "-o", "json")
        assert answer.code == 0, answer.error + self.run("job", "logs", handle).output
        assert answer.document["state"] == "succeeded"
        return answer.document


def use_pytorch_job() -> tuple[str, ...]:
    """Return the override that selects a PyTorchJob for a fixed number of nodes."""
    return ('launch.target=[{kind="kubernetes", api="pytorchjob"}]',)
