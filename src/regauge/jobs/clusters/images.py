"""Container images: render, build and push a variant's Dockerfile."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from regauge import __version__
from regauge.jobs.clusters.facts import FOLDER
from regauge.jobs.clusters.image_lints import check_image
from regauge.jobs.clusters.pins import CONSTRAINTS, find_pins
from regauge.jobs.clusters.rendering import render_text
from regauge.jobs.clusters.settings import Image, ImageSettings
from regauge.jobs.lints_job import is_pinned
from regauge.jobs.lints_tokens import find_token
from regauge.system.children import run_tool
from regauge.system.choices import did_you_mean
from regauge.system.errors import ChildError, PreflightError, SettingsError
from regauge.system.files import check_absent, read_csv_rows, sha256, write_atomic

DOCKERFILE = "Dockerfile"
TOOLS = ("docker", "podman", "buildah")
EFA = {
    "version": "1.49.0",
    "sha256": "cf2e9281a2328a243c76f911a490faed43ca0fecfe4733c25e34b2e92a32c309",
}
"""EFA installer. Source: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-start-nccl.html;
checksum from ai-dynamo/dynamo, recipes/nemotron-3.5-lightning/vllm."""
CYCLONEDX = "7.5.0"
"""cyclonedx-bom version; it writes the software list in the image."""
CHECK_SECONDS = 20.0
"""Time limit for checking whether a program works."""
_IMAGE_NAME = re.compile(r"[\w.-]+(:\d+)?(/[\w.-]+)*(:[\w][\w.-]{0,127})?(@sha256:[0-9a-f]{64})?")


@dataclass(frozen=True)
class ImageVariant:
    name: str
    base: str
    slim_base: str
    """Base image without compilers; empty if it is the same."""
    has_torch: bool
    """Whether the base image contains accelerator torch, which pip must not replace."""
    extras: tuple[str, ...]
    """`regauge` package extras to install."""
    has_efa: bool
    source: str


@cache
def load_variants() -> Mapping[str, ImageVariant]:
    """Return variant name -> variant, from `images.csv`."""
    return {
        row["variant"]: ImageVariant(
            row["variant"],
            row["base"],
            row["slim_base"],
            row["has_torch"] == "yes",
            tuple(row["extras"].split()),
            row["efa"] == "yes",
            row["source"],
        )
        for row in read_csv_rows(FOLDER / "images.csv")
    }


def find_variant(name: str) -> ImageVariant:
    """Return a variant; raises SettingsError for an unknown name."""
    variants = load_variants()
    if name not in variants:
        remedy = did_you_mean(name, tuple(variants))
        raise SettingsError(f"no image variant named '{name}'", remedy)
    return variants[name]


def resolve_name(settings: ImageSettings) -> str:
    """Return the image name with tag; raises SettingsError if it is not pinned."""
    name = settings.image.name or settings.launch.image
    if name is None:
        problem = "the image needs a name"
        raise SettingsError(problem, "set image.name or launch.image, such as team/regauge:1")
    check_pinned(name, "image.name" if settings.image.name else "launch.image")
    return name


def check_pinned(name: str, key: str) -> None:
    """Raise SettingsError for an image name without a fixed tag or digest."""
    if not _IMAGE_NAME.fullmatch(name):
        remedy = "write registry/repository:tag, such as team/regauge:1.0"
        raise SettingsError(f"{key} = '{name}' is not an image name", remedy)
    if not is_pinned(name):
        problem = f"{key} = '{name}' has no fixed version"
        raise SettingsError(problem, "name a tag other than latest, or a digest")


def render_image(settings: ImageSettings, run_file: Path) -> str:
    """Return the Dockerfile text; raises SettingsError for invalid settings."""
    image, variant = settings.image, find_variant(settings.image.variant)
    base = image.base or variant.base
    check_pinned(base, "image.base")
    has_python = base.startswith("python:")
    compiler = ("g++",) if has_python else ("g++", "python3-dev")
    python = () if has_python else ("python3-venv",)
    packages = {"ca-certificates", *(() if has_python else ("python3",))}
    packages |= {"curl"} if variant.has_efa else set()
    slim_base = base if image.base else variant.slim_base or base
    extras = list_extras(image)
    return render_text(
        "Dockerfile.jinja",
        version=__version__,
        variant=variant.name,
        base=base,
        runtime=base if image.compiler else slim_base,
        has_torch=variant.has_torch,
        build_packages=sorted({*packages, *compiler, *python}),
        packages=sorted({*packages, *(compiler if image.compiler else ())}),
        cyclonedx=CYCLONEDX,
        index=image.index,
        efa=EFA if variant.has_efa else None,
        extras=f"[{','.join(extras)}]" if extras else "",
        has_server="serve" in extras,
        wheel=None if image.wheel is None else Path(image.wheel).name,
        run_file=run_file.name,
        run_file_sha256=sha256(run_file),
        files=[Path(name).name for name in image.files],
    )


def write_context(settings: ImageSettings, run_file: Path, *, overwrite: bool) -> list[Path]:
    """Write the Dockerfile and the files that it copies; return their paths.

    Raises SettingsError if a file is missing, holds a token, or exists in the folder already.
    """
    image, folder = settings.image, Path(settings.image.folder)
    text = render_image(settings, run_file)
    pins = find_pins(image.constraints, list_extras(image)).text
    copies = [run_file, *map(Path, image.files), *([Path(image.wheel)] if image.wheel else [])]
    for path in copies:
        _check_copy(path)
        if path.name in (DOCKERFILE, CONSTRAINTS):
            raise SettingsError(f"the image has its own {path.name}", f"rename {path}")
    ignored = "".join(
        f"{line}\n" for line in ("*", f"!{CONSTRAINTS}", *(f"!{p.name}" for p in copies))
    )
    texts = {DOCKERFILE: text, CONSTRAINTS: pins, ".dockerignore": ignored}
    targets = [*(folder / name for name in texts), *(folder / path.name for path in copies)]
    check_absent(targets, overwrite=overwrite)
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in texts.items():
        write_atomic(folder / name, content, durable=False)
    for path in copies:
        if path.resolve() != (folder / path.name).resolve():
            shutil.copyfile(path, folder / path.name)
    return targets


def list_extras(image: Image) -> tuple[str, ...]:
    """Return the variant's and the settings' extras, without repetitions."""
    return tuple(dict.fromkeys((*find_variant(image.variant).extras, *image.extras)))


def _check_copy(path: Path) -> None:
    """Raise SettingsError for a file that is missing or contains an access token."""
    if not path.is_file():
        raise SettingsError(f"no file {path}", "correct image.files or image.wheel")
    if " " in path.name:
        raise SettingsError(f"'{path.name}' has a space in its name", "rename it")
    text = path.read_bytes().decode(errors="ignore") if path.suffix != ".whl" else ""
    if kind := find_token(text):
        problem = f"{path} contains {kind}, and everyone with the image can read it"
        raise SettingsError(problem, "remove it, and set launch.secrets to a reference")


def find_tool(image: Image) -> str:
    """Return the program that builds images here.

    Raises PreflightError if no program works, for example without a daemon.
    """
    names = TOOLS if image.tool == "auto" else (image.tool,)
    for name in names:
        if shutil.which(name) is not None and _is_usable(name):
            return name
    problem = f"no program that builds images works here (tried {', '.join(names)})"
    raise PreflightError(problem, "install buildah, or start the docker daemon")


def _is_usable(name: str) -> bool:
    """Return whether a program's `info` command succeeds; docker needs a daemon for it."""
    try:
        return run_tool([name, "info"], CHECK_SECONDS).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def build_command(tool: str, action: str, name: str, folder: Path) -> list[str]:
    """Return the command line for the action `build` or `push`."""
    if action == "push":
        return [tool, "push", name]
    # The OCI format has no SHELL, which makes a failing pipe end the build.
    options = ["--format", "docker"] if tool != "docker" else []
    file = ["--file", str(folder / DOCKERFILE)]
    return [tool, "build", *options, "--tag", name, *file, str(folder)]


def run_command(command: list[str]) -> None:
    """Run a command line; raises ChildError with the exit code if it fails."""
    if code := subprocess.run(command, check=False).returncode:
        problem = f"'{command[0]} {command[1]}' ended with exit code {code}"
        raise ChildError(code, f"{problem}; read its output above, then run it again")


def describe_image(settings: ImageSettings, run_file: Path) -> dict[str, Any]:
    variant = find_variant(settings.image.variant)
    base, extras = settings.image.base or variant.base, list_extras(settings.image)
    return {
        "image": resolve_name(settings),
        "variant": variant.name,
        "base": base,
        "source": variant.source if settings.image.base is None else "image.base",
        "run_file": run_file.name,
        "warnings": [
            f"{item.problem}; {item.remedy}"
            for item in check_image(base, find_pins(settings.image.constraints, extras))
        ],
    }
