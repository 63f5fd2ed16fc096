"""kubectl commands, with failures as errors with a remedy."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from regauge.jobs.targets import Handle
from regauge.jobs.targets._clients import build_client_error, find_client, run_client
from regauge.system.errors import PreflightError, RegaugeError, SettingsError, TransientError

PACKAGE = "kubectl: https://kubernetes.io/docs/tasks/tools"
CONTEXT_REMEDY = "set launch.target.context to a context of `kubectl config get-contexts`"
CREDENTIAL_PHRASES = (
    "unauthorized",
    "must be logged in",
    "getting credentials",
    "provide credentials",
    "asked for the client to provide",
)
"""Parts of kubectl messages about rejected credentials, in lowercase."""
MISSING_PHRASES = ("notfound", "not found")
DEFAULT_REMEDY = "correct the setting that kubectl names"
"""Remedy for failures without a specific one."""
DELETE_SECONDS = 50
APPLY = ("apply", "--server-side", "--force-conflicts", "--field-manager=regauge")
"""kubectl options that create or change objects."""


@dataclass(frozen=True)
class KubectlNamespace:
    context: str
    namespace: str

    def run(self, *arguments: str, text: str | None = None) -> str:
        """Run kubectl and return its output; raises the same errors as `run_kubectl`."""
        return run_kubectl(*self._options, *arguments, text=text, remedy=DEFAULT_REMEDY)

    def find(self, *arguments: str) -> dict[str, Any] | None:
        """Return an object or list as JSON; None if the server does not have it."""
        try:
            return dict(json.loads(self.run("get", *arguments, "-o", "json")))
        except SettingsError as error:
            if is_missing(error):
                return None
            raise

    def list_items(self, *arguments: str) -> list[dict[str, Any]]:
        """Return a list's objects; empty if the server does not know their kind."""
        document = self.find(*arguments)
        return list(document["items"]) if document else []

    def create(self, text: str) -> str:
        """Create a YAML document's object; return `kind/name`.

        `create` refuses an existing object, which `apply` would change.
        """
        return self.run("create", "-f", "-", "-o", "name", text=text).strip()

    def apply(self, text: str) -> None:
        """Create or change a YAML document's object; fields from other managers stay."""
        self.run(*APPLY, "-f", "-", text=text)

    def delete(self, *arguments: str) -> None:
        """Delete objects and wait until they are gone; missing objects are ignored."""
        self.run("delete", *arguments, "--ignore-not-found", f"--timeout={DELETE_SECONDS}s")

    def patch(self, kind: str, name: str, patch: dict[str, Any]) -> None:
        self.run("patch", kind, name, "--type=merge", "-p", json.dumps(patch))

    def stream(self, *arguments: str) -> Iterator[str]:
        """Yield a command's output lines while it runs; raises like `run_kubectl`."""
        command = [find_client("kubectl", PACKAGE), *self._options, *arguments]
        with (
            tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as messages,
            subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=messages,
                encoding="utf-8",
                errors="replace",
            ) as process,
        ):
            try:
                for line in process.stdout or ():
                    yield line.rstrip("\n")
            except BaseException:
                process.kill()
                raise
            if process.wait():
                messages.seek(0)
                raise _convert_error(
                    build_client_error("kubectl", messages.read(), remedy="try again")
                )

    def command(self, *arguments: str) -> str:
        return " ".join(("kubectl", *self._options, *arguments))

    @property
    def _options(self) -> tuple[str, ...]:
        return (f"--context={self.context}", f"--namespace={self.namespace}")


def split_handle(handle: Handle) -> list[str]:
    """Return a handle's context, namespace, kind and name.

    The context may contain slashes, like an EKS cluster ARN.
    """
    return f"{handle.context}/{handle.job_id}".rsplit("/", 3)


def find_context(context: str | None) -> str:
    """Return a context, by default the current one; raises PreflightError without one."""
    if context is not None:
        return context
    try:
        return run_kubectl("config", "current-context", remedy=CONTEXT_REMEDY).strip()
    except SettingsError:
        raise PreflightError("kubectl has no current context", CONTEXT_REMEDY) from None


def run_kubectl(*arguments: str, text: str | None = None, remedy: str) -> str:
    """Run kubectl and return its output.

    Raises PreflightError without kubectl or without valid credentials. Raises TransientError if the
    server is unreachable, and SettingsError if it rejects the command.
    """
    command = (find_client("kubectl", PACKAGE), *arguments)
    try:
        return run_client(command, text=text, remedy=remedy)
    except SettingsError as error:
        raise _convert_error(error) from None


def is_missing(error: RegaugeError) -> bool:
    """Return whether an error reports an object or kind that the server does not have."""
    lower = error.problem.lower()
    is_unknown_kind = "doesn't have a resource type" in lower
    return is_unknown_kind or any(phrase in lower for phrase in MISSING_PHRASES)


def _convert_error(error: TransientError | SettingsError) -> RegaugeError:
    """Convert a kubectl error, with the remedy for its reason."""
    if isinstance(error, TransientError):
        return error
    problem, lower = error.problem, error.problem.lower()
    if any(phrase in lower for phrase in CREDENTIAL_PHRASES):
        return PreflightError(problem, "log in to the cluster, then try again")
    if "context" in lower and "does not exist" in lower:
        return SettingsError(problem, CONTEXT_REMEDY)
    if "alreadyexists" in lower:
        return SettingsError(problem, "set launch.name, or clean up the earlier job of this name")
    if "exceeded quota" in lower:
        return SettingsError(problem, "request fewer nodes, or ask for a larger quota")
    if "no matches for kind" in lower or "doesn't have a resource type" in lower:
        return SettingsError(problem, "install the Kubeflow operator, or set launch.target.api")
    if "forbidden" in lower:
        return SettingsError(problem, "ask for this permission, or set launch.target.namespace")
    return error
