"""The command line: `regauge <verb> run.toml key.path=value …`.

Verbs are registered by name and imported when called, so `--help` does not need torch. Every verb
exception ends here: it is printed as one line and becomes an exit code.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from itertools import pairwise

from cyclopts import (
    App,
    CycloptsError,
    Group,
    MissingArgumentError,
    Parameter,
    UnknownOptionError,
)

from regauge import __doc__ as package_doc
from regauge import __version__
from regauge.system import choices, log, processes, stop_signals
from regauge.system.errors import (
    ERROR_PREFIX,
    SHOW_TRACEBACK,
    ChildError,
    SettingsError,
    StopSignalError,
    describe_error,
)
from regauge.system.wording import join_alternatives

AS_JSON = "--json"
FORMATS = ("-o", "--output")
"""Output format options of some verbs."""
GROUPS = {
    "Prepare and train": ("init", "prepare", "train", "compile", "import", "pipeline", "replay"),
    "Evaluate and compare": ("evaluate", "compare", "benchmark", "report"),
    "Export, predict and serve": ("export", "predict", "serve", "generate"),
    "Plan and launch": ("plan", "catalog", "doctor", "launch", "job", "cluster", "image"),
    "Watch and manage": ("runs", "top", "monitor", "models", "gate", "promote", "explain"),
}
"""Help group -> verbs."""
COMPLETE = "__complete"
"""Command called by the cyclopts completion script to get candidates."""
_EPILOGUE = f"""\
A run file is TOML or JSON; key.path=value arguments override it. {SHOW_TRACEBACK} prints the \
traceback of an error. `regauge explain` documents every setting and exit code."""


def build_app() -> App:
    """Build the command line, with one command for each verb."""
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
    groups = {
        verb: group
        for index, (title, verbs) in enumerate(GROUPS.items())
        for group in [Group(title, sort_key=index)]
        for verb in verbs
    }
    for verb in choices.names("verbs"):
        target = f"{choices.module_name('verbs', verb)}:main"
        summary, _, example = choices.docstring("verbs", verb).partition("\n\n")
        application.command(
            target,
            name=verb,
            help=summary,
            help_epilogue=f"{example}\n\n{_EPILOGUE}",
            group=groups.get(verb),
        )
    return application


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code."""
    tokens = list(sys.argv[1:] if arguments is None else arguments)
    show_traceback = SHOW_TRACEBACK in tokens
    log.configure()
    try:
        with stop_signals.call_at_limit(_report_stop):
            _run_verb([token for token in tokens if token != SHOW_TRACEBACK])
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 (torch's CheckpointException is no Exception)
        if show_traceback:
            traceback.print_exception(error)
        report = describe_error(error)
        if not processes.is_supervised():  # otherwise the supervisor prints the line
            log.stderr.print(f"{ERROR_PREFIX}{report.line}", style="red", markup=False)
            if wants_json(tokens) and not log.stdout.has_document:
                log.print_json(report.to_document())
        return report.code
    return 0


def wants_json(tokens: Sequence[str]) -> bool:
    """Return whether a command line asks for JSON: `--json`, `-o json` or `--output json`."""
    words = {AS_JSON, *(f"{name}=json" for name in FORMATS)}
    return not words.isdisjoint(tokens) or any(
        name in FORMATS and value == "json" for name, value in pairwise(tokens)
    )


def _report_stop() -> None:
    """Print the line for a command ended by a stop signal; the main thread may hold any lock."""
    number = stop_signals.find_signal()
    if number is not None and not processes.is_supervised():
        os.write(sys.stderr.fileno(), f"{ERROR_PREFIX}{StopSignalError(number)}\n".encode())


def _run_verb(tokens: list[str]) -> None:
    application = build_app()
    verb = tokens[0] if tokens else ""
    if verb and verb not in application and verb != COMPLETE:
        category = "option" if verb.startswith("-") else "verb"
        known = [name for name in application if name.startswith("-") == verb.startswith("-")]
        raise SettingsError(f"no {category} named '{verb}'", choices.did_you_mean(verb, known))
    try:
        stop_signals.check_stop()
        answer = application(tokens, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        raise _convert_usage_error(error, verb) from None
    if isinstance(answer, dict) and {"error", "code"} <= answer.keys():  # a refused dry run
        raise ChildError(answer["code"], answer["error"])


def _suggest_option(option: str, flags: list[str]) -> str:
    """Return the remedy for an unknown option; settings are written as key.path=value.

    An option whose words are in a flag means this flag, such as `--max-tokens` `--max-new-tokens`.
    """
    from regauge.config import peer_names  # pydantic, which `--help` does not need

    words = set(option.lstrip("-").split("-"))
    if matches := [flag for flag in flags if words <= set(flag.lstrip("-").split("-"))]:
        return choices.did_you_mean(option, matches)
    settings = [setting.partition("=") for setting in peer_names.find_settings(option)]
    if not settings and (reason := peer_names.find_absence(option)):
        return f"remove it, because {reason}"
    if not settings:
        return choices.did_you_mean(option, flags)
    overrides = [f"{key}={value or '…'}" for key, _, value in settings]
    return f"write it without dashes: {join_alternatives(overrides)}"


def _convert_usage_error(error: CycloptsError, verb: str) -> SettingsError:
    """Convert a cyclopts usage error to a problem and a remedy."""
    see_help = f"see 'regauge {verb} --help'"
    if isinstance(error, UnknownOptionError):
        flags = [
            name
            for argument in error.argument_collection or ()
            for name in argument.names
            if argument.show and name.startswith("-")
        ]
        option = error.token.value.partition("=")[0]
        return SettingsError(f"'{verb}' has no option '{option}'", _suggest_option(option, flags))
    if isinstance(error, MissingArgumentError) and error.keyword is None and error.argument:
        name = error.argument.field_info.names[0].replace("_", "-").upper()
        return SettingsError(f"'{verb}' needs the argument {name}", see_help)
    error.verbose = False
    problem, _, remedy = str(error).strip().partition(". ")
    problem = problem[:1].lower() + problem[1:].rstrip(".")
    return SettingsError(problem, remedy[:1].lower() + remedy[1:] or see_help)
