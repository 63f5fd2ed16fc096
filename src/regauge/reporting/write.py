"""A report as a file, in the form that is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from regauge.errors import SettingsError
from regauge.reporting import text

if TYPE_CHECKING:
    from regauge.reporting.settings import ReportSettings
    from regauge.reporting.story import Story


def path_of(folder: str, settings: ReportSettings) -> Path:
    """Return where a report goes."""
    return Path(folder) / f"report.{settings.format}"


def write(path: Path, story: Story) -> None:
    """Write the whole file or nothing, in the form of its suffix; no reader sees half a report."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{path.name}.new")
        aside.write_text(_text(story, path.suffix), encoding="utf-8")
        aside.replace(path)
    except (PermissionError, NotADirectoryError, FileExistsError) as error:
        raise SettingsError(
            f"{path} cannot be written: {error.strerror}", "set another output.folder"
        ) from None


def _text(story: Story, suffix: str) -> str:
    if suffix == ".html":
        from regauge.reporting.html import page

        return page(story)
    return text.markdown(story) if suffix == ".md" else text.document(story)
