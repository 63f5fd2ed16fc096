"""The command line: `regauge <verb> run.toml key.path=value …`.

Verbs are registered by name alone and imported when they are called, so help needs no torch.
What a verb raises ends here, as one line and an exit code; no verb knows how it is printed.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence

from cyclopts import App, CycloptsError, Parameter

from regauge import __doc__ as package_doc
from regauge import __version__, choices, log, processes
from regauge.errors import SHOW_TRACEBACK, SettingsError, explain

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
    for verb in choices.names("verbs"):
        target = f"{choices.module_name('verbs', verb)}:main"
        application.command(target, name=verb, help=choices.summary("verbs", verb))
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
        if processes.supervised():
            return code  # Its supervisor says the line.
        log.stderr.print(f"regauge: {line}", style="red", markup=False)
        return code
    return 0


def _call(tokens: list[str]) -> None:
    application = app()
    verb = tokens[0] if tokens else ""
    if verb and verb not in application:
        what = "option" if verb.startswith("-") else "verb"
        known = [name for name in application if name.startswith("-") == verb.startswith("-")]
        raise SettingsError(f"no {what} named '{verb}'", choices.did_you_mean(verb, known))
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
