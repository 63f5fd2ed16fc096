"""Terraform accepts the configuration of a cluster, with the provider of the machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from urllib.request import urlopen

import pytest

from distributed.runs import FULL
from regauge.jobs.clusters.rendering import TERRAFORM_FOLDER, render_files, write_files
from regauge.system.processes import find_free_port
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


OVERRIDE = """provider "aws" {{
  access_key                  = "testing"
  secret_key                  = "testing"
  skip_credentials_validation = true
  skip_metadata_api_check     = true
  skip_requesting_account_id  = true
  endpoints {{
    ec2 = "{url}"
    eks = "{url}"
    iam = "{url}"
    sts = "{url}"
    efs = "{url}"
  }}
}}
"""
"""Provider for a simulated account."""


@pytest.fixture
def account(tmp_path: Path) -> Iterator[str]:
    """Return the address of a simulated account with the managed policies of AWS."""
    port = find_free_port()
    url = f"http://127.0.0.1:{port}"
    command = [str(Path(sys.executable).with_name("moto_server")), "-H", "127.0.0.1"]
    variables = {**os.environ, "MOTO_IAM_LOAD_MANAGED_POLICIES": "true"}
    with (tmp_path / "moto.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "-p", str(port)], stdout=log, stderr=log, env=variables
        )
    try:
        until = time.monotonic() + 120
        while time.monotonic() < until:
            with suppress(OSError), urlopen(f"http://127.0.0.1:{port}/moto-api/"):
                break
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait()


@FULL
@pytest.mark.skipif(not PROVIDER.is_dir(), reason=f"no provider in {MIRROR}: not applied")
@pytest.mark.skipif(find_spec("moto") is None, reason="no moto: not applied")
def test_the_cluster_is_created_in_a_simulated_account(tmp_path: Path, account: str) -> None:
    """Moto has no add-ons of EKS and answers for FSx in another form, so both are left out."""
    files = ({"name": "home", "kind": "efs"},)
    cluster = build_cluster("p5", "trn1", "cpu", file_systems=files)
    write_files(tmp_path, render_files(cluster), overwrite=False)
    folder = tmp_path / TERRAFORM_FOLDER
    (folder / "override.tf").write_text(OVERRIDE.format(url=account))
    assert run_terraform(folder, "init", "-input=false").returncode == 0
    options = ("-auto-approve", "-input=false", "-no-color", "-var=addons=[]")
    process = run_terraform(folder, "apply", *options)
    assert process.returncode == 0, process.stderr
    resources = run_terraform(folder, "state", "list").stdout.splitlines()
    groups = [name for name in resources if name.startswith("aws_eks_node_group")]
    assert groups == [f'aws_eks_node_group.node["{name}"]' for name in ("cpu", "p5", "trn1")]
    template = run_terraform(folder, "state", "show", "-no-color", 'aws_launch_template.node["p5"]')
    assert template.stdout.count("interface_type") == 32
    assert "cr-0123456789abcdef0" in template.stdout
    assert run_terraform(folder, "destroy", *options).returncode == 0
