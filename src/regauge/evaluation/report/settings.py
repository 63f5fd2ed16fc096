"""Report settings: a run file's [report] table. This module does not import matplotlib."""

from __future__ import annotations

from typing import Literal

from regauge.config import Settings


class ReportOptions(Settings):
    """Report content and format."""

    runs: tuple[str, ...] = ()
    """Output folders, in report order; default: those in `output.folder`, or a
    pipeline's earlier stages."""
    format: Literal["html", "md", "json"] = "html"
    """Self-contained HTML page, Markdown, or JSON."""
    title: str | None = None
    """Title; default: built from the run names."""
