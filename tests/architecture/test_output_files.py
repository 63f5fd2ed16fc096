"""One module names the files in the output folder of a run; all others import the names."""

from __future__ import annotations

import ast

import pytest

from architecture.tree import Source, sources
from regauge.config import output_files

NAMES_MODULE = "regauge/config/output_files.py"
NAMES = {
    name
    for key, name in vars(output_files).items()
    if key.isupper() and isinstance(name, str) and "." in name
}
OTHER_FOLDERS = {
    ("regauge/jobs/targets/_local_job.py", output_files.JOB),
    ("regauge/jobs/targets/ray.py", output_files.JOB),
}
"""Files of the same name in the folder of a launched job."""


def find_names(source: Source) -> list[str]:
    """Return the string literals of a file that are the name of a run's file."""
    return [
        f"{source.path}:{node.lineno} {node.value!r}"
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and (name := node.value.rpartition("/")[2]) in NAMES
        and (source.path, name) not in OTHER_FOLDERS
    ]


def test_names_are_in_one_module() -> None:
    assert {output_files.METRICS, output_files.LEDGER, output_files.LAST_SEEN} <= NAMES
    problems = [
        line for source in sources() if source.path != NAMES_MODULE for line in find_names(source)
    ]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("text", ["'metrics.jsonl'", "f'{folder}/ledger.jsonl'", "x / '.seen'"])
def test_a_name_elsewhere_is_detected(text: str) -> None:
    assert find_names(Source("regauge/a.py", f"path = {text}\n"))
