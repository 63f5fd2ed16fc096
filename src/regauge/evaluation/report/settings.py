"""Settings of a report: the [report] table of a run file. This module imports no matplotlib."""

from __future__ import annotations

from typing import Literal

from regauge.config import Settings


class ReportOptions(Settings):
    """Content and format of a report."""

    runs: tuple[str, ...] = ()
    """Output folders, in report order; by default those in or next to `output.folder`."""
    format: Literal["html", "md", "json"] = "html"
    """Self-contained HTML page, Markdown, or JSON."""
    title: str | None = None
    """Title; by default built from the names of the runs."""
