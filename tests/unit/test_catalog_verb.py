"""The verb `catalog`: lists and entries with sources, and the words of refused names."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from regauge import cli
from regauge.machines import catalog

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def _no_user_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGAUGE_CATALOG", str(tmp_path))


def read_answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert cli.main(["catalog", *arguments, "--json"]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def test_list_selects_by_name_and_chip(capsys: pytest.CaptureFixture[str]) -> None:
    answer = read_answer(capsys, "list", "h100")
    assert [item["name"] for item in answer["instances"]] == ["p5.4xlarge", "p5.48xlarge"]
    assert len(read_answer(capsys, "list")["instances"]) == len(catalog.load_instances())
    assert answer["instances"][1]["as_of"] == "2026-07-20"


def test_old_prices_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    (warning,) = read_answer(capsys, "list", "p5.48xlarge")["warnings"]
    assert warning == "1 of 1 prices are older than 90 days; run: regauge catalog refresh"


def test_list_chips(capsys: pytest.CaptureFixture[str]) -> None:
    names = [item["name"] for item in read_answer(capsys, "list", "--chips", "gaudi")["chips"]]
    assert names == ["Gaudi1 (HL-205)", "Gaudi2", "Gaudi3"]


def test_show_has_the_source_and_the_history(capsys: pytest.CaptureFixture[str]) -> None:
    (entry,) = read_answer(capsys, "show", "p5.48xlarge")["entries"]
    assert entry["prices"] == (
        "2023-08-08: 98.32, 2025-06-23: 55.04, 2026-07-20: 55.04,"
        " 2026-08-26: 58.8928 in eu-north-1, 2026-08-26: 55.04 in us-east-2,"
        " 2026-08-26: 55.04 in us-west-2"
    )
    assert entry["source"].startswith("aws/karpenter-provider-aws")
    assert "days old" in entry["warning"]
    (chip,) = read_answer(capsys, "show", "A10G")["entries"]
    assert chip["bf16_teraflops"] == 70, "125 is the peak of the A10"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("show", "p5.48xlarg"), "did you mean 'p5.48xlarge'"),
        (("show",), "'show' needs a name"),
        (("list", "p99"), "'p99' is not in the catalog"),
        (("import",), "'import' needs a file"),
        (("list", "--region", "eu-west-1"), "--region has no effect on list"),
        (("show", "A10G", "--chips"), "--chips has no effect on show"),
        (("refresh", "p5.48xlarg"), "did you mean 'p5.48xlarge'"),
    ],
)
def test_wrong_arguments_exit_with_code_2(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert cli.main(["catalog", *arguments]) == 2
    assert message in capsys.readouterr().err.replace("\n", " ")
