"""The layers of the package, from the foundation up, and the order of the machinery packages."""

from __future__ import annotations

from architecture.tree import CHOICES

FOUNDATION = (
    "callbacks",
    "config",
    "choices",
    "log",
    "errors",
    "files",
    "garbage",
    "hooks",
    "host",
    "processes",
    "json_files",
    "jsonl",
    "object_store",
    "peer_names",
    "safetensors_io",
    "scratch",
    "stop_signals",
    "timing",
    "units",
    "validation",
    "wording",
    "worker",
)
PARTS = ("data", "models")
MACHINERY = (
    "monitoring",
    "testing",
    "planning",
    "checkpoint",
    "health",
    "supervision",
    "results",
    "model_registry",
    "artifacts",
    "training",
    "run_plans",
    "evaluation",
    "comparison",
    "reporting",
    "preparation",
    "prediction",
    "serving",
    "benchmarking",
    "recipes",
    "pipelines",
    "launching",
    "terminal_view",
    "clusters",
)
"""What verbs share, in order: a package imports those before it, and their settings modules."""
TOP = ("api", "cli", "__main__", "__init__")
LAYERS = ("foundation", "accelerators' interface", "parts", "choices", "machinery", "verbs", "cli")
CHOICE_LAYER, MACHINERY_LAYER = 3, 4


def layer_of(module: str) -> int:
    """Return the height of a module, 0 for the foundation."""
    parts = module.split(".")[1:]
    package = parts[0] if parts else "__init__"
    if package in FOUNDATION:
        return 0
    if package in CHOICES and len(parts) == 1:  # the interface: the folder's __init__
        return 1 if package == "accelerators" else 2
    layers = (
        (PARTS, 2),
        (CHOICES, CHOICE_LAYER),
        (MACHINERY, MACHINERY_LAYER),
        (("verbs",), 5),
        (TOP, 6),
    )
    for packages, height in layers:
        if package in packages:
            return height
    raise AssertionError(f"{module} is in no layer: add its package to {__file__}")


def is_settings(module: str) -> bool:
    """Return whether a module holds only settings: schemas of a run file, free of machinery."""
    return module.rpartition(".")[2].endswith("settings")
