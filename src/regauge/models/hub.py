"""Where a model's folder is: what a run left, a folder, or what a hub keeps under a name."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path

from regauge.errors import SettingsError, plain

CONFIG = "config.json"
WANTED = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
"""What is fetched of a name on the hub."""
WAYS_IN = "run: hf auth login (or set HF_TOKEN), or name a local folder"
_LOCAL_ONLY = ContextVar("local_only", default=False)
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def final(path: str) -> Path:
    """Return where a run's final model lies, or the path itself where it is no run's."""
    model = Path(path) / "model"
    return model if (model / CONFIG).is_file() else Path(path)


@contextmanager
def local_only() -> Iterator[None]:
    """Fetch nothing inside of the block: a name on the hub is its local copy, if there is one."""
    token = _LOCAL_ONLY.set(True)
    try:
        yield
    finally:
        _LOCAL_ONLY.reset(token)


def at(path: str, *, fetch: bool = True) -> Path:
    """Return the folder of a path's weights: a run's final model, a folder, a hub name's copy.

    What a hub has is fetched once, unless `fetch` is false or inside of `local_only`. Raises
    SettingsError where there is nothing, or nothing for whoever asks.
    """
    folder = final(path)
    if not folder.exists() and _HUB_NAME.fullmatch(path):
        folder = _fetched(path, fetch=fetch and not _LOCAL_ONLY.get())
    if not (folder / CONFIG).is_file():
        raise SettingsError(
            f"no model at '{path}': {'it has no' if folder.exists() else 'there is no'} {CONFIG}",
            f"name a folder with {CONFIG} and model.safetensors",
        )
    return folder


@cache
def _fetched(name: str, *, fetch: bool) -> Path:
    """Return the local copy of what the hub has under a name, of one revision for all."""
    from huggingface_hub import errors, snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        found = snapshot_download(name, allow_patterns=list(WANTED), local_files_only=not fetch)
    except errors.GatedRepoError:
        terms = f"'{name}' is given only to those who accept its terms on the hub"
        raise SettingsError(terms, f"accept them, then {WAYS_IN}") from None
    except errors.RepositoryNotFoundError:
        absent = f"the hub has no model '{name}', or none that it shows without a token"
        raise SettingsError(absent, f"correct it; for a private one {WAYS_IN}") from None
    except (errors.HfHubHTTPError, OSError, ValueError) as error:
        answer = (
            f"and no answer from the hub: {plain(error)}" if fetch else "nor a copy of the hub's"
        )
        silent = f"no folder '{name}' is here, {answer}"
        raise SettingsError(silent, "name a folder of weights") from None
    return Path(found)
