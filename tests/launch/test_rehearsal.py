"""A rehearsal runs the processes of a plan twice, and reports a job that a lost node changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launch.training_jobs import Workplace, create_workplace

NOISE = '''
import regauge


class Noise(regauge.Callback):
    """Changes a weight of a run after it was resumed."""

    def on_step(self, event):
        if (event.folder / "attempts.jsonl").read_text().count("started_at") > 1:
            next(event.model.parameters()).data.add_(1e-3)
'''


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    workplace = create_workplace(tmp_path_factory.mktemp("rehearsals"))
    yield workplace
    workplace.clean_up()


@pytest.mark.parametrize("count", ["2", "1", "1:2"])
def test_a_job_that_loses_a_node_equals_the_undisturbed_job(
    workplace: Workplace, figure: Callable[[str, float], None], count: str
) -> None:
    name = f"equal-{count.replace(':', '-')}"
    run_file = workplace.write_run(name, stop={"steps": 100000})
    arguments = ("train", f"execution.nodes.count={count}", "--rehearse", "-o", "json")
    answer = workplace.run("launch", str(run_file), *arguments)
    assert answer.code == 0, answer.error
    report = answer.document
    assert report["rows_equal"]
    assert report["metrics_equal"]
    assert report["attempts"] == 2
    assert report["nodes"] == int(count[-1])
    assert report["lost_node"] == report["nodes"] - 1
    assert 12 <= report["lost_after_step"] < report["steps"]
    assert 0 < report["recovery_seconds"] < report["disturbed_seconds"]
    assert report["is_elastic"] == (":" in count)
    if not report["is_elastic"]:
        assert report["weights_equal"]
        assert report["max_weight_difference"] == 0
    assert "stop.steps = 40" in report["changes"]
    seconds = report["recovery_seconds"]
    figure(f"seconds to recover in the rehearsal of {count} local nodes", seconds)
    assert not (workplace.root / f"out-{name}").exists(), "the output folder is not touched"
    assert not (workplace.root / "state").exists(), "no job is submitted"


def test_a_run_that_changes_after_a_restart_is_reported(workplace: Workplace) -> None:
    (workplace.root / "noise.py").write_text(NOISE)
    run_file = workplace.write_run("noise", callbacks=("noise.py:Noise",))
    answer = workplace.run("launch", str(run_file), "train", "--rehearse")
    assert answer.code == 68, answer.error
    line = answer.error.splitlines()[-1]
    assert "the job that lost a node differs from the undisturbed job: weights by" in line


def test_a_run_that_fails_is_reported_with_its_line(workplace: Workplace, tmp_path: Path) -> None:
    run_file = workplace.write_run("missing", data={"path": str(tmp_path / "none")})
    answer = workplace.run("launch", str(run_file), "train", "--rehearse")
    assert answer.code not in {0, 1}
    assert str(tmp_path / "none") in answer.error.splitlines()[-1]
