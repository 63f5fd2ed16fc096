"""Checks for secrets in a plan: strings that look like tokens, and telling variable names.

A finding names a secret's location, never the value.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from regauge.jobs.lints import Check, Lint, build_lint, walk
from regauge.jobs.targets import LaunchPlan
from regauge.jobs.targets._secret_files import PREFIX, parse_secret_path

TOKENS = {
    "an AWS access key": re.compile(r"\b(AKIA|ASIA|ABIA|ACCA)[A-Z2-7]{16}\b"),
    "a Hugging Face token": re.compile(r"\bhf_[A-Za-z0-9]{20,}\b"),
    "a GitHub token": re.compile(r"\b(gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{22,})\b"),
    "a GitLab token": re.compile(r"\bglpat-[\w-]{20,}"),
    "an API key": re.compile(r"(?<![\w-])sk-(?=[\w-]*\d)[\w-]{20,}"),
    "an NVIDIA API key": re.compile(r"\bnvapi-[\w-]{20,}"),
    "a Google API key": re.compile(r"\bAIza[\w-]{35}"),
    "a Slack token": re.compile(r"\bxox[abprs]-[\w-]{10,}"),
    "a JSON web token": re.compile(r"\beyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]+"),
    "a private key": re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----"),
    "a webhook address": re.compile(
        r"\bhttps://(hooks\.slack\.com/services|discord(app)?\.com/api/webhooks"
        r"|[\w.-]+\.webhook\.office\.com/webhookb2|chat\.googleapis\.com/v1/spaces)/\S{8,}"
    ),
    "a password in an address": re.compile(r"\b[a-z][a-z0-9+.-]*://[^/\s:@]*:[^/\s:@]+@"),
}
"""Secret formats, as documented by vendors."""
SECRET_NAME = re.compile(
    r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_KEY|PRIVATE_KEY|PASS|PASSPHRASE"
    r"|CREDENTIALS?|WEBHOOK(_URL)?)$|_PWD$",
    re.IGNORECASE,
)
"""Names of variables that hold a secret."""
PASSWORD = re.compile(r"(?=.*[a-z])(?=.*[A-Z])(?=.*\d.*\d)[A-Za-z0-9+=_!@#$%^&*]{12,}")
"""Values that look like a random password, whatever the name."""


def check_tokens(plan: LaunchPlan) -> Iterator[Lint]:
    """Report secrets in a job's variables, references, labels, overrides and documents."""
    for location, value in _list_values(plan):
        if kind := find_token(value):
            yield build_lint("secret", problem=f"{location} contains {kind}")
    for name, value in plan.job.environment.items():
        if value and SECRET_NAME.search(name) and find_token(value) is None:
            problem = f"launch.environment.{name} has the name of a secret"
            yield build_lint("secret", problem=problem)
        elif PASSWORD.fullmatch(value):
            yield build_lint("secret-value", name=name)
    for name, reference in plan.job.secrets.items():
        path = Path(parse_secret_path(reference))
        if reference.startswith(PREFIX) and not os.path.exists(path):  # noqa: PTH110 - no errors
            yield build_lint("secret-file", name=name, path=path)


def find_token(text: str) -> str | None:
    """Return which kind of secret a text contains, if any."""
    return next((kind for kind, pattern in TOKENS.items() if pattern.search(text)), None)


def _list_values(plan: LaunchPlan) -> Iterator[tuple[str, str]]:
    """Yield location and text for every text in a plan, documents last."""
    job = plan.job
    tables = {"environment": job.environment, "secrets": job.secrets, "labels": job.labels}
    for table, values in tables.items():
        for name, value in values.items():
            yield f"launch.{table}.{name}", value
    for word in job.command:
        yield f"the override of '{word.partition('=')[0]}'", word
    yield "output.folder", job.output
    for document in plan.documents:
        for path, value in walk(document.content):
            yield f"{document.name} {path}".strip(), str(value)


CHECKS: tuple[Check, ...] = (check_tokens,)
