"""Write a golden run file to start from; without a name, list them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from regauge import choices, verbs
from regauge.errors import SettingsError


def main(
    name: Annotated[str | None, Parameter(help="a golden run file, as quickstart")] = None,
    file: Annotated[
        Path | None, Parameter(help="file to write; <name>.toml here if absent")
    ] = None,
    *,
    json: verbs.AsJson = False,
) -> dict[str, Any]:
    """Write the golden run file of that name, and never over another file."""
    known = {path.stem: path for path in sorted(folder().glob("*.toml"))}
    if name is None:
        listed = [{"name": stem, "what": _summary(path)} for stem, path in known.items()]
        return verbs.show({"run_files": listed}, as_json=json)
    if name not in known:
        raise SettingsError(f"no golden run file '{name}'", choices.did_you_mean(name, [*known]))
    target = Path(f"{name}.toml") if file is None else Path(file)
    try:
        with target.open("x", encoding="utf-8") as new:
            new.write(known[name].read_text(encoding="utf-8"))
    except FileExistsError:
        raise SettingsError(f"{target} exists", "name another file to write") from None
    except FileNotFoundError:
        raise SettingsError(
            f"no folder {target.parent}", "create it, or name another file"
        ) from None
    return verbs.show({"written": str(target), "what": _summary(known[name])}, as_json=json)


def folder() -> Path:
    """Return the folder of the golden run files: in the wheel, else in the checkout."""
    installed = choices.PACKAGE / "runs"
    return installed if installed.is_dir() else choices.PACKAGE.parent.parent / "runs"


def _summary(path: Path) -> str:
    """Return what the first comment of a run file says."""
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    return first.removeprefix("#").strip() if first.startswith("#") else ""
