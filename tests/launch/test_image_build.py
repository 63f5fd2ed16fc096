"""A real build of an image with buildah, pushed to a registry on loopback.

The base image is Debian from debootstrap, or the folder that REGAUGE_TEST_ROOTFS names. Regauge
itself is a small wheel with one dependency, because torch alone has gigabytes. pip asks the package
index of this machine.
"""

from __future__ import annotations

import json
import os
import shutil
import ssl
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.request import urlopen

import pytest

from distributed.runs import FULL
from regauge.system.processes import find_free_port

NEEDED = ("buildah", "debootstrap", "docker-registry")
SEARCH = f"{os.environ['PATH']}:/usr/sbin"
MISSING = ", ".join(name for name in NEEDED if shutil.which(name, path=SEARCH) is None)
pytestmark = [
    FULL,
    pytest.mark.skipif(bool(MISSING), reason=f"no {MISSING} here: builds are not proved"),
    pytest.mark.skipif(os.geteuid() != 0, reason="debootstrap needs root: builds are not proved"),
]
PACKAGES = "python3,python3-venv,ca-certificates"
WHEEL = "regauge-0.1.0-py3-none-any.whl"
METADATA = "Metadata-Version: 2.1\nName: regauge\nVersion: 0.1.0\nProvides-Extra: s3\n"
DEPENDENCY, PINNED = "idna", "3.7"  # older than what pip would choose
REGISTRY = """version: 0.1
storage:
  filesystem:
    rootdirectory: {folder}
http:
  addr: {address}
"""


def write_wheel(folder: Path) -> Path:
    """Write a wheel of a program that prints its user and its folder."""
    path, info = folder / WHEEL, "regauge-0.1.0.dist-info"
    program = "import os\ndef main():\n    print(os.getuid(), os.getcwd(), *os.listdir())\n"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("regauge/__init__.py", program)
        wheel.writestr(f"{info}/METADATA", f"{METADATA}Requires-Dist: {DEPENDENCY}\n")
        tag = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{info}/WHEEL", tag)
        wheel.writestr(f"{info}/entry_points.txt", "[console_scripts]\nregauge = regauge:main\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


def run(*command: str, **variables: str) -> str:
    environment = {**os.environ, **variables}
    process = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[str]:
    address = f"127.0.0.1:{find_free_port()}"
    config = tmp_path / "registry.yml"
    config.write_text(REGISTRY.format(folder=tmp_path / "registry", address=address))
    command = ["docker-registry", "serve", str(config)]
    with (tmp_path / "registry.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            with suppress(OSError), urlopen(f"http://{address}/v2/"):
                break
            time.sleep(0.1)
        yield address
    finally:
        process.terminate()
        process.wait()


@pytest.fixture
def storage(tmp_path: Path, registry: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let buildah store images in a temporary folder, and trust the registry on loopback."""
    folder = tmp_path / "storage"
    config, registries = tmp_path / "storage.conf", tmp_path / "registries.conf"
    roots = f'runroot = "{folder}/run"\ngraphroot = "{folder}/graph"\n'
    config.write_text(f'[storage]\ndriver = "vfs"\n{roots}')
    registries.write_text(f'[[registry]]\nlocation = "{registry}"\ninsecure = true\n')
    monkeypatch.setenv("CONTAINERS_STORAGE_CONF", str(config))
    monkeypatch.setenv("CONTAINERS_REGISTRIES_CONF", str(registries))
    monkeypatch.setenv("BUILDAH_ISOLATION", "chroot")
    return folder


def build_base(folder: Path) -> str:
    root = Path(os.environ.get("REGAUGE_TEST_ROOTFS", folder / "rootfs"))
    if not root.exists():
        options = ("--variant=minbase", f"--include={PACKAGES}", "bookworm", str(root))
        run("debootstrap", *options, PATH=SEARCH)
    container = run("buildah", "from", "scratch").strip()
    run("buildah", "add", "-q", container, str(root), "/")
    certificates = os.environ.get("PIP_CERT") or ssl.get_default_verify_paths().cafile
    config = folder / "pip.conf"
    config.write_text("[global]\ncert = /etc/index.crt\n" if certificates else "")
    run("buildah", "add", "-q", container, str(config), "/etc/pip.conf")
    if certificates:
        run("buildah", "add", "-q", container, certificates, "/etc/index.crt")
    run("buildah", "commit", "-q", container, "localhost/debian-base:12")
    return "localhost/debian-base:12"


@pytest.mark.timeout(1500)  # it installs three sets of packages
def test_an_image_is_built_pushed_and_runs_as_another_user(
    tmp_path: Path, registry: str, storage: Path
) -> None:
    run_file, folder = tmp_path / "travel.toml", tmp_path / "context"
    run_file.write_text(f'[launch]\nimage = "{registry}/travel:1"\n')
    constraints = tmp_path / "pins.txt"
    constraints.write_text(f"{DEPENDENCY}=={PINNED}\n")
    overrides = [
        f"image.base={build_base(tmp_path)}",
        f"image.wheel={write_wheel(tmp_path)}",
        f"image.constraints={constraints}",
        "image.compiler=false",
    ]
    command = [str(run_file), *overrides, "image.tool=buildah", "--to", str(folder)]
    for action in ("build", "push"):
        run(sys.executable, "-m", "regauge", "image", action, *command)
    with urlopen(f"http://{registry}/v2/travel/tags/list") as answer:
        assert b'"1"' in answer.read()
    container = run("buildah", "from", f"{registry}/travel:1").strip()
    assert run("buildah", "run", container, "--", "regauge").split() == [
        "10001",
        "/workspace",
        "travel.toml",
    ]
    bill = json.loads(run("buildah", "run", container, "--", "cat", "/opt/regauge/sbom.cdx.json"))
    versions = {item["name"]: item["version"] for item in bill["components"]}
    assert bill["bomFormat"] == "CycloneDX"
    assert (versions[DEPENDENCY], versions["regauge"]) == (PINNED, "0.1.0")
    assert "cyclonedx-bom" not in versions
    root = Path(run("buildah", "mount", container).strip())
    compilers = [root / folder / name for folder in ("bin", "usr/bin") for name in ("g++", "cc")]
    assert not [path for path in compilers if path.is_symlink() or path.exists()]
    assert not list((root / "var/lib/apt/lists").glob("*Packages*"))
    assert not (root / "root/.cache").exists()
    labels = run("buildah", "inspect", "--format", "{{.OCIv1.Config.Labels}}", container)
    assert "regauge.run-file:travel.toml" in labels
    assert storage.exists()
