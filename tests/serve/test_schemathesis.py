"""Generated requests for every documented route: no failure of the server, and known statuses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import APIOperation, Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import status_code_conformance

from regauge.serving.openapi import build_document
from serve.live_server import LiveServer

EXAMPLES = [10, pytest.param(150, marks=pytest.mark.full)]
CHECKS = [not_a_server_error, status_code_conformance]
SCHEMA = schemathesis.openapi.from_dict(build_document())
OPERATIONS: list[APIOperation] = [result.ok() for result in SCHEMA.get_all_operations()]
VALID, INVALID = GenerationMode.POSITIVE, GenerationMode.NEGATIVE


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    with requests.Session() as opened:
        yield opened


def takes_input(operation: APIOperation) -> bool:
    """Return whether requests of an operation differ."""
    return bool(operation.body or operation.path_parameters)


@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("mode", [VALID, INVALID], ids=["valid", "invalid"])
@pytest.mark.parametrize("operation", OPERATIONS, ids=[item.label for item in OPERATIONS])
def test_generated_requests_are_answered(
    server: LiveServer,
    session: requests.Session,
    operation: APIOperation,
    mode: GenerationMode,
    examples: int,
) -> None:
    if mode is INVALID and not operation.body:
        assert operation.method == "get"  # a path of text has no invalid value
        return
    statuses: set[int] = set()

    @settings(
        max_examples=examples if takes_input(operation) else 1,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: Case) -> None:
        response = case.call(base_url=server.url, session=session, timeout=60)
        case.validate_response(response, checks=CHECKS)
        statuses.add(response.status_code)

    send()
    assert statuses
    if mode is INVALID:
        assert statuses - {200}
