"""Compiles the device once per version of its sources and of torch, and loads it."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.machinery
import importlib.util
import os
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

SOURCES = Path(__file__).parent
CACHE = (
    Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "regauge-tests" / "simulated"
)
MODULE = "_simulated"
FLAGS = ("-std=c++20", "-O1", "-fPIC", "-w")


def load() -> ModuleType:
    """Return the compiled module; compiles it if the cache has no library of these sources."""
    path = build()
    loader = importlib.machinery.ExtensionFileLoader(MODULE, str(path))
    specification = importlib.util.spec_from_loader(MODULE, loader)
    assert specification is not None
    module = importlib.util.module_from_spec(specification)
    loader.exec_module(module)
    return module


def build() -> Path:
    """Return the path of the library; one process compiles it, and others wait."""
    library = CACHE / _hash_inputs() / f"{MODULE}.so"
    if library.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    with (library.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _compile(library)
    return library


def _hash_inputs() -> str:
    digest = hashlib.sha256(f"{version('torch')} {sys.version} {FLAGS}".encode())
    for path in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _compile(library: Path) -> None:
    import torch

    root = Path(torch.__file__).parent
    folders = (root / "include", root / "include/torch/csrc/api/include")
    includes = [f"-isystem{path}" for path in (*folders, sysconfig.get_paths()["include"])]
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:

        def compile_source(source: Path) -> str:
            target = f"{scratch}/{source.stem}.o"
            _run(["g++", *FLAGS, *includes, "-c", str(source), "-o", target])
            return target

        with ThreadPoolExecutor(2) as pool:
            objects = list(pool.map(compile_source, sorted(SOURCES.glob("*.cpp"))))
        libraries = ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
        linked = f"{scratch}/{library.name}"
        _run(["g++", "-shared", *objects, f"-L{root}/lib", *libraries, "-o", linked])
        Path(linked).replace(library)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, encoding="utf-8", check=False)
    if done.returncode:
        raise RuntimeError(f"the simulated device cannot be compiled:\n{done.stderr[-4000:]}")
