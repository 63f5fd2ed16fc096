"""The rooms of the package, from the ground up, and the packages inside them."""

from __future__ import annotations

ROOMS = (
    "system",
    "config",
    "machines",
    "monitoring",
    "accelerators",
    "data",
    "models",
    "tasks",
    "run_folders",
    "supervision",
    "training",
    "registry",
    "inference",
    "evaluation",
    "serving",
    "planner",
    "jobs",
    "commands",
)
"""The folders of `regauge`: a room imports those before it, and all settings modules."""
GROUND = ("system", "config")
"""Rooms that everything imports."""
PARTS = ("data", "models", "tasks")
"""Rooms that use an accelerator through its interface alone."""
TOP = ("__init__", "__main__", "cli")
INNER = (
    "commands._python",
    "commands._recipes",
    "commands._top",
    "data.prepare",
    "evaluation.benchmark",
    "evaluation.compare",
    "evaluation.report",
    "inference.backends",
    "inference.export",
    "inference.predict",
    "jobs.clusters",
    "jobs.targets",
    "monitoring.trackers",
    "planner.run_plans",
    "planner.search",
    "registry.pipelines",
    "supervision.faults",
    "supervision.health",
    "training.checkpoint",
    "training.strategies",
)
"""Packages inside a room that form no cycle with each other or with the rest of the room."""


def room_of(module: str) -> str:
    """Return the room of a module, or the name of a module at the top."""
    name = [*module.split("."), "__init__"][1]
    if name not in (*ROOMS, *TOP):
        raise AssertionError(f"{module} is in no room: add its folder to {__file__}")
    return name


def height_of(module: str) -> int:
    """Return the height of a module, 0 for the lowest room."""
    room = room_of(module)
    return ROOMS.index(room) if room in ROOMS else len(ROOMS)


def package_of(module: str) -> str:
    """Return the package of a module that must be free of cycles, such as `data.prepare`."""
    name = module.removeprefix("regauge.")
    inner = [package for package in INNER if f"{name}.".startswith(f"{package}.")]
    return inner[0] if inner else room_of(module)


def is_settings(module: str) -> bool:
    """Return whether a module holds only settings: schemas of a run file, free of machinery."""
    return module.rpartition(".")[2].endswith("settings")
