"""The command line: `regauge <verb> run.toml key.path=value …`.

Verbs are registered by name alone and imported when they are called, so help needs no torch.
What a verb raises ends here, as one line and an exit code; no verb knows how it is printed.
"""

from __future__ import annotations

import errno
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from cyclopts import App, CycloptsError, Parameter

from regauge import __doc__ as package_doc
from regauge import __version__, log, registry
from regauge.errors import INTERRUPTED, RegaugeError, SettingsError, TransientError

SHOW_TRACEBACK = "--traceback"

_EPILOGUE = f"""\
A run file is TOML; key.path=value on the command line goes over it. With {SHOW_TRACEBACK} an \
error is shown whole. `regauge explain` lists every setting and exit code."""


def app() -> App:
    """Return the command line with every verb that has a file."""
    application = App(
        name="regauge",
        help=(package_doc or "").partition("\n")[0],
        help_epilogue=_EPILOGUE,
        version=__version__,
        version_flags="--version",
        help_format="plaintext",
        help_flags=("--help", "-h"),
        default_parameter=Parameter(negative=()),
        result_action="return_value",
        suppress_keyboard_interrupt=False,
    )
    application.register_install_completion_command(add_to_startup=False)
    for verb in registry.names("verbs"):
        target = f"{registry.module_name('verbs', verb)}:main"
        application.command(target, name=verb, help=registry.summary("verbs", verb))
    return application


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code."""
    tokens = list(sys.argv[1:] if arguments is None else arguments)
    show_traceback = SHOW_TRACEBACK in tokens
    log.configure()
    try:
        _call([token for token in tokens if token != SHOW_TRACEBACK])
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 (torch's CheckpointException is no Exception)
        if show_traceback:
            traceback.print_exception(error)
        line, code = explain(error)
        log.stderr.print(f"regauge: {line}", style="red", markup=False)
        return code
    return 0


def explain(error: BaseException) -> tuple[str, int]:
    """Return the one line for an error that ended a verb, and the exit code."""
    if isinstance(error, KeyboardInterrupt):
        return "stopped; run the same command again and it continues", INTERRUPTED
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        where = f" at {error.filename}" if error.filename else ""
        error = TransientError(
            f"no space left on the disk{where}", "free some and run the same command again"
        )
    if isinstance(error, RegaugeError):
        return _one_line(str(error)), error.exit_code
    what = _one_line(str(error)) or "no message"
    remedy = f"run again with {SHOW_TRACEBACK} to see all of it"
    return f"{type(error).__name__} in {_place(error)}: {what}; {remedy}", 1


def _call(tokens: list[str]) -> None:
    application = app()
    verb = tokens[0] if tokens else ""
    if verb and verb not in application:
        what = "option" if verb.startswith("-") else "verb"
        known = [name for name in application if name.startswith("-") == verb.startswith("-")]
        raise SettingsError(f"no {what} named '{verb}'", registry.did_you_mean(verb, known))
    try:
        application(tokens, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        raise _usage(error, verb) from None


def _usage(error: CycloptsError, verb: str) -> SettingsError:
    """Return a mistake on the command line as a problem and a remedy."""
    error.verbose = False
    problem, _, remedy = str(error).strip().partition(". ")
    problem = problem[:1].lower() + problem[1:].rstrip(".")
    return SettingsError(problem, remedy[:1].lower() + remedy[1:] or f"see 'regauge {verb} --help'")


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _place(error: BaseException) -> str:
    """Return `file:line` of the innermost frame of Regauge, or of the innermost one of all."""
    walked = traceback.walk_tb(error.__traceback__)
    places = [(Path(frame.f_code.co_filename), line) for frame, line in walked]
    ours = [
        (path.relative_to(registry.PACKAGE.parent), line)
        for path, line in places
        if path.is_relative_to(registry.PACKAGE)
    ]
    path, line = (ours or places)[-1]
    return f"{path}:{line}"
