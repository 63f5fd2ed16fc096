"""Terraform accepts the configuration of a cluster, with the provider of the machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from regauge.clusters.rendering import TERRAFORM_FOLDER, render_files, write_files
from unit.test_cluster_documents import GROUPS, build_cluster

MIRROR = Path(os.environ.get("REGAUGE_TERRAFORM_PROVIDERS", "/opt/tf-plugins"))
PROVIDER = MIRROR / "registry.terraform.io" / "hashicorp" / "aws"

pytestmark = [
    pytest.mark.skipif(
        shutil.which("terraform") is None, reason="no terraform here: it is not proved"
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the Terraform folder of a cluster with every kind of group, initialized."""
    root = tmp_path_factory.mktemp("cluster")
    write_files(root, render_files(build_cluster(*GROUPS)), overwrite=False)
    folder = root / TERRAFORM_FOLDER
    yield folder
    shutil.rmtree(folder / ".terraform", ignore_errors=True)


def run_terraform(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command of Terraform; providers come from a folder of this machine."""
    config = folder / "terraform.rc"
    config.write_text(
        f'provider_installation {{\n  filesystem_mirror {{ path = "{MIRROR}" }}\n}}\n'
    )
    variables = {**os.environ, "TF_CLI_CONFIG_FILE": str(config), "CHECKPOINT_DISABLE": "1"}
    command = ["terraform", f"-chdir={folder}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=variables)


def test_the_configuration_has_the_standard_format(folder: Path) -> None:
    process = run_terraform(folder, "fmt", "-check", "-diff")
    assert process.returncode == 0, process.stdout


@pytest.mark.skipif(not PROVIDER.is_dir(), reason=f"no provider in {MIRROR}: not validated")
def test_the_configuration_is_valid_and_takes_the_values(folder: Path) -> None:
    process = run_terraform(folder, "init", "-input=false", "-no-color")
    assert process.returncode == 0, process.stderr
    process = run_terraform(folder, "validate", "-json")
    answer = json.loads(process.stdout)
    assert answer["valid"], answer["diagnostics"]
    expression = 'jsonencode(var.node_groups["p4de"].efa_interfaces)\n'
    command = ["terraform", f"-chdir={folder}", "console"]
    variables = {**os.environ, "TF_CLI_CONFIG_FILE": str(folder / "terraform.rc")}
    console = subprocess.run(
        command, input=expression, capture_output=True, text=True, check=False, env=variables
    )
    assert console.stdout.strip() == '"4"', console.stderr


@pytest.mark.skipif(not PROVIDER.is_dir(), reason=f"no provider in {MIRROR}: not validated")
def test_a_wrong_argument_is_detected(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns(".terraform*"))
    text = (copy / "main.tf").read_text()
    (copy / "main.tf").write_text(text.replace("interface_type  ", "interface_kind  ", 1))
    assert run_terraform(copy, "init", "-input=false").returncode == 0
    assert run_terraform(copy, "validate").returncode != 0
