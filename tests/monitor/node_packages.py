"""Packages of Node.js that check documents: their installation, and programs that use them."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "regauge-tests"
PACKAGES = CACHE / "node-dashboards"


def require_packages(*names: str, proof: str) -> Path:
    """Return the folder with the packages, after they are installed; skip without Node.js."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip(f"node or npm is not installed: {proof} is not proved")
    if any(not (PACKAGES / "node_modules" / name).is_dir() for name in names):
        PACKAGES.mkdir(parents=True, exist_ok=True)
        install = [npm, "install", "--no-audit", "--no-fund", "--prefix", str(PACKAGES), *names]
        subprocess.run(install, check=True, capture_output=True)
    return PACKAGES


def run_node(*command: str | Path) -> str:
    """Return the output of a program of Node.js, which must succeed or fail with its findings."""
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=PACKAGES)
    return done.stdout + done.stderr if done.returncode else ""
