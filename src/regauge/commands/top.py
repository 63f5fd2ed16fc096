"""Show a run, a job or a server on the terminal, live.

For example:

    $ regauge top out/run
"""

from __future__ import annotations

from typing import Annotated, Any

from cyclopts import Parameter

from regauge import commands
from regauge.system import log


def main(
    target: Annotated[
        str,
        Parameter(help="Output folder, handle of `launch`, or address of `serve` (http://…)."),
    ],
    *,
    once: Annotated[bool, Parameter(help="Print one snapshot and exit.")] = False,
    json: commands.OutputFormat = commands.TEXT,
) -> dict[str, Any]:
    """Show processes, rates, memory, cost and events twice a second; `q` quits.

    It reads files and writes nothing. Without a terminal it prints one snapshot.

    For example:

        >>> regauge.top("out/run")
    """
    from regauge.commands._top.targets import open_reader

    reader = open_reader(target)
    if json.is_json or log.is_embedded():
        document = reader.read().document
        return commands.show(document, as_json=True) if json.is_json else document
    from regauge.commands._top import live_view

    if once or not live_view.is_live_terminal():
        snapshot = reader.read()
        live_view.show_once(snapshot, log.stdout)
        return snapshot.document
    return live_view.show_live(reader).document
