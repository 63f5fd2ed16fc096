"""Checks for a job's image, limits and machines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from regauge.jobs.job_spec import IMAGE_FOLDER
from regauge.jobs.lints import Check, Lint, find_images, walk
from regauge.jobs.targets import LaunchPlan
from regauge.machines.catalog import find_instance
from regauge.system import choices

if TYPE_CHECKING:
    from regauge.accelerators import Accelerator

SHARED_MEMORY = "/dev/shm"  # noqa: S108 - the mount of containers, not a file of this process
SHARED_MEMORY_KEYS = ("sharedMemorySize",)


def check_image_tag(plan: LaunchPlan) -> Iterator[Lint]:
    """Report images without a tag or digest, or with the tag `latest`, which changes."""
    images = find_images(plan) | ({plan.job.image} if plan.job.image else set())
    for image in sorted(images):
        if is_pinned(image):
            continue
        yield Lint(
            "image-tag",
            f"the image '{image}' has no fixed version",
            "name a tag other than latest, or a digest, in launch.image",
            "https://kubernetes.io/docs/concepts/containers/images/#image-names",
        )


def is_pinned(image: str) -> bool:
    """Return whether an image name has a digest, or a tag other than `latest`."""
    if "@sha256:" in image:
        return True
    tag = image.rpartition("/")[2].partition(":")[2]
    return tag not in {"", "latest"}


def is_mounted(output: str, mounts: Iterable[str]) -> bool:
    """Return whether a container's output folder is a mount or below one.

    Relative folders are below the image's working folder.
    """
    folder = IMAGE_FOLDER / output
    return any(folder.is_relative_to(mount) for mount in mounts)


def check_hours(plan: LaunchPlan) -> Iterator[Lint]:
    """Warn about a job without a time limit on machines that cost money."""
    job = plan.job
    if job.hours is None and job.usd_per_hour is not None:
        yield Lint(
            "time-limit",
            f"the job has no time limit, and its machines cost {job.usd_per_hour:.2f} USD per hour",
            "set launch.hours",
            "https://github.com/skypilot-org/skypilot/issues/9815",
            is_error=False,
        )


def check_shared_memory(plan: LaunchPlan) -> Iterator[Lint]:
    """Report containers with the default /dev/shm, which is too small for loader processes."""
    leaves = [leaf for document in plan.documents for leaf in walk(document.content)]
    is_sized = any(
        value == SHARED_MEMORY or path.rpartition(".")[2] in SHARED_MEMORY_KEYS
        for path, value in leaves
    )
    if find_images(plan) and not is_sized:
        yield Lint(
            "shared-memory",
            f"no document sets the size of {SHARED_MEMORY}, so it has 64 MiB",
            "set launch.shared_memory_gib",
            "https://github.com/pytorch/pytorch#using-pre-built-images",
        )


def check_accelerator(plan: LaunchPlan) -> Iterator[Lint]:
    """Report an instance without chips for the run's accelerator."""
    job, machine = plan.job, plan.job.machine
    if machine is None or job.accelerator is None or choices.is_import_path(job.accelerator):
        return
    vendors = _load_vendors(job.accelerator)
    if not vendors or machine.vendor in vendors:
        return
    known = choices.names("accelerators")
    kinds = [name for name in known if machine.vendor in _load_vendors(name)]
    chips = machine.chip if machine.chips else "no accelerator"
    yield Lint(
        "accelerator",
        f"accelerator '{job.accelerator}' does not run on {machine.name}, which has {chips}",
        f"set accelerator to {kinds[0] if kinds else 'cpu'}, or correct launch.instance",
        find_instance(machine.name).source,
    )


def _load_vendors(kind: str) -> tuple[str, ...]:
    """Return the accelerator's chip vendors; empty if unknown."""
    accelerator: type[Accelerator] = choices.load("accelerators", kind)
    return accelerator.chip_vendors


CHECKS: tuple[Check, ...] = (
    check_image_tag,
    check_hours,
    check_shared_memory,
    check_accelerator,
)
