"""Write the files for a Kubernetes cluster on EKS, or remove the cluster and list leftovers.

For example:

    $ regauge cluster render run.toml --to cluster
"""

from __future__ import annotations

import datetime as dt
import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from regauge import commands
from regauge.jobs.clusters import removal
from regauge.jobs.clusters.cluster_lints import check_cluster
from regauge.jobs.clusters.rendering import describe_cluster, render_files, write_files
from regauge.jobs.clusters.settings import ClusterSettings

ROOT = ClusterSettings
OUTPUT = "cluster.folder"

Action = Literal["render", "delete"]


def main(
    action: Annotated[Action, Parameter(help="Write the files, or remove the cluster.")],
    run_file: commands.RunFile,
    *overrides: commands.Override,
    to: Annotated[Path | None, Parameter(help="Output folder; default: cluster.folder.")] = None,
    overwrite: commands.Overwrite = False,
    dry_run: commands.DryRun = False,
    json: commands.AsJson = False,
) -> dict[str, Any]:
    """Write eksctl and Terraform files with their commands and price, or remove the cluster.

    `render` sends nothing. `delete` runs the printed commands. Then it lists the remaining
    resources, with the commands that remove them. With --dry-run it only prints the commands.

    For example:

        >>> regauge.cluster("render", "run.toml", to="cluster")
    """
    folder = () if to is None else (f"{OUTPUT}={to}",)
    settings = commands.load_settings(ROOT, run_file, (*overrides, *folder))
    if action == "delete":
        return commands.show(delete(settings, dry_run=dry_run), as_json=json)
    if dry_run:
        return commands.show(plan(settings), as_json=json)
    return commands.show(run(settings, overwrite=overwrite), as_json=json)


def plan(settings: ClusterSettings) -> dict[str, Any]:
    """Return a cluster's files, commands and price.

    Raises SettingsError for invalid settings.
    """
    warnings = check_cluster(settings.cluster, dt.datetime.now(dt.UTC).date())
    answer = describe_cluster(settings.cluster, Path(settings.cluster.folder))
    return answer | {"warnings": [f"{item.problem}; {item.remedy}" for item in warnings]}


def run(settings: ClusterSettings, *, overwrite: bool = False) -> dict[str, Any]:
    """Write a cluster's files; return them with the commands and the price."""
    answer = plan(settings)
    folder = Path(settings.cluster.folder)
    write_files(folder, render_files(settings.cluster), overwrite=overwrite)
    return answer


def delete(settings: ClusterSettings, *, dry_run: bool = False) -> dict[str, Any]:
    """Remove a cluster and return the remaining resources; a dry run returns the commands."""
    cluster, folder = settings.cluster, Path(settings.cluster.folder)
    commands = [shlex.join(line) for line in removal.list_removal_commands(cluster, folder)]
    if dry_run:
        audit = removal.list_audit_commands(cluster, folder)
        return {"cluster": cluster.name, "commands": commands, "audit": audit}
    leftovers = [item._asdict() for item in removal.remove_cluster(cluster, folder)]
    return {"cluster": cluster.name, "commands": commands, "leftovers": leftovers}
