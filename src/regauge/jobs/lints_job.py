"""Checks for a job's image, limits and machines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from regauge.jobs.job_spec import IMAGE_FOLDER
from regauge.jobs.lints import Check, Lint, build_lint, find_images, walk_documents
from regauge.jobs.targets import LaunchPlan
from regauge.machines.catalog import find_instance
from regauge.system import choices

if TYPE_CHECKING:
    from regauge.accelerators import Accelerator

SHARED_MEMORY = "/dev/shm"  # noqa: S108 - the mount of containers, not a file of this process


def check_image_tag(plan: LaunchPlan) -> Iterator[Lint]:
    """Report images without a tag or digest, or with the tag `latest`, which changes."""
    images = find_images(plan) | ({plan.job.image} if plan.job.image else set())
    for image in sorted(images):
        if not is_pinned(image):
            yield build_lint("image-tag", image=image)


def is_pinned(image: str) -> bool:
    """Return whether an image name has a digest, or a tag other than `latest`."""
    tag = image.rpartition("/")[2].partition(":")[2]
    return "@sha256:" in image or tag not in {"", "latest"}


def is_mounted(output: str, mounts: Iterable[str]) -> bool:
    """Return whether a container's output folder is a mount or below one.

    Relative folders are below the image's working folder.
    """
    folder = IMAGE_FOLDER / output
    return any(folder.is_relative_to(mount) for mount in mounts)


def check_hours(plan: LaunchPlan) -> Iterator[Lint]:
    """Warn about a job without a time limit on machines that cost money."""
    if plan.job.server is None and plan.job.hours is None and plan.job.usd_per_hour is not None:
        yield build_lint("time-limit", price=plan.job.usd_per_hour)


def check_shared_memory(plan: LaunchPlan) -> Iterator[Lint]:
    """Report containers with the default /dev/shm, which is too small for loader processes."""
    is_sized = any(
        value == SHARED_MEMORY or path.endswith(".sharedMemorySize")
        for path, value in walk_documents(plan)
    )
    if find_images(plan) and not is_sized:
        yield build_lint("shared-memory")


def check_accelerator(plan: LaunchPlan) -> Iterator[Lint]:
    """Report an instance without chips for the run's accelerator."""
    job, machine = plan.job, plan.job.machine
    if machine is None or job.accelerator is None or choices.is_import_path(job.accelerator):
        return
    vendors = _load_vendors(job.accelerator)
    if vendors and machine.vendor not in vendors:
        known = choices.names("accelerators")
        kinds = [name for name in known if machine.vendor in _load_vendors(name)]
        yield build_lint(
            "accelerator",
            accelerator=job.accelerator,
            machine=machine.name,
            chips=machine.chip if machine.chips else "no accelerator",
            kind=kinds[0] if kinds else "cpu",
            source=find_instance(machine.name).source,
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
