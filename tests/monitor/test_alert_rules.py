"""Each alert fires on its condition, and only then."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from monitor.rule_tests import find_alerts, find_values, require_promtool, write_rules
from regauge.cli import main
from regauge.monitoring.dashboard_files import build_dashboards, list_expressions
from regauge.monitoring.prometheus_settings import AlertThresholds
from regauge.monitoring.rule_files import build_alert_rules

RULES = [
    rule for group in build_alert_rules(AlertThresholds())["groups"] for rule in group["rules"]
]
STEPS = 'regauge_rank_step{run="a",rank="0",node="n"}'
GPU = '{gpu="0",Hostname="n",instance="n:9400"}'
ECC = 'hardware_ecc_events_total{neuron_device_index="2",instance="n:8000",'
DCGM = {
    f"DCGM_FI_DEV_{name}{GPU}": "50x400"
    for name in ("GPU_UTIL", "FB_USED", "FB_FREE", "SM_CLOCK", "GPU_TEMP", "POWER_USAGE")
}


class Case(NamedTuple):
    """Series that fire an alert, and changes of them that do not."""

    series: dict[str, str | tuple[str | None, str | None]]
    """Series -> values; two if they differ, and None for a series that is absent."""
    text: str
    """A part of the labels or annotations of the alert."""
    at: str = "20m"

    def select(self, index: int) -> dict[str, str]:
        """Return the series that fire (0), or those that do not (1)."""
        pairs = {
            name: (values, values) if isinstance(values, str) else values
            for name, values in self.series.items()
        }
        return {name: values for name, pair in pairs.items() if (values := pair[index])}


CASES = {
    "RegaugeRunFailed": Case(
        {
            'regauge_run_failed{run="a",instance="n:1"}': "0x60 1 stale",
            'regauge_run_failed{run="a",instance="n:2"}': (None, "_x64 0x20"),
        },
        "Run a has failed",
        "17m",
    ),
    "RegaugeAttemptFailed": Case(
        {
            'regauge_run_failures_total{run="a",kind="hang"}': ("0x60 1x20", "1x80"),
            'regauge_run_failures_total{run="a",kind="preempted"}': "0x60 1x20",
        },
        "run a failed (hang)",
        "16m",
    ),
    "RegaugeRankDead": Case(
        {'regauge_rank_alive{run="a",rank="3"}': ("0x80", "1x80")}, "rank 3 of run a"
    ),
    "RegaugeRankStopped": Case(
        {'regauge_rank_stopped{run="a",rank="3"}': ("0x60 1x20", "0x60 1x1 0x19")},
        "rank 3 of run a",
        "16m",
    ),
    "RegaugeNoProgress": Case(
        {
            'regauge_rank_step_timestamp_seconds{run="a",rank="0"}': ("0+15x40 600x40", "0+15x80"),
            'regauge_rank_step_timestamp_seconds{run="a",rank="1"}': ("0+15x40 600x40", "0+15x80"),
            'regauge_rank_beat_timestamp_seconds{run="a",rank="0"}': ("0+15x41 615x39", "0+15x80"),
            'regauge_rank_beat_timestamp_seconds{run="a",rank="1"}': ("0+15x40 600x40", "0+15x80"),
        },
        "Rank 1 is stopped, or was silent first",
    ),
    "RegaugeStepsSkipped": Case(
        {'regauge_train_skipped_steps_total{run="a"}': ("0x70 3x10", "3x80")}, "Run a skipped 3"
    ),
    "RegaugeStraggler": Case(
        {
            STEPS: "0+15x80",
            'regauge_rank_straggler_delay_seconds{run="a",rank="0"}': ("0.25x80", "0.05x80"),
        },
        "by 25%",
    ),
    "RegaugeCheckpointOld": Case(
        {
            'regauge_run_checkpoint_timestamp_seconds{run="a"}': ("60x200", "60x100 1500x100"),
            'regauge_rank_alive{run="a",rank="0"}': "1x200",
        },
        "39m 0s old",
        "40m",
    ),
    "RegaugeNoCheckpoint": Case(
        {STEPS: "1x200", 'regauge_run_checkpoint_timestamp_seconds{run="a"}': (None, "2000x200")},
        "without a checkpoint",
        "40m",
    ),
    "RegaugeGoodputLow": Case({'regauge_run_goodput_ratio{run="a"}': ("0.4x80", "0.6x80")}, "40%"),
    "RegaugeBudgetNear": Case(
        {
            'regauge_run_cost_usd_total{run="a"}': ("95x80", "101x80"),
            'regauge_run_budget_usd{run="a"}': "100x80",
        },
        "95%",
    ),
    "RegaugeBudgetOver": Case(
        {
            'regauge_run_cost_usd_total{run="a"}': ("101x80", "95x80"),
            'regauge_run_budget_usd{run="a"}': "100x80",
        },
        "101%",
    ),
    "RegaugePredictFailures": Case(
        {
            'regauge_predict_failed_records_total{run="a"}': ("5x80", "0x80"),
            'regauge_predict_records_total{run="a"}': "95x80",
        },
        "5%",
    ),
    "RegaugeXid": Case(
        {f"DCGM_FI_DEV_XID_ERRORS{GPU}": ("13x60 79x20", "79x100")}, "error 79", "16m"
    ),
    "RegaugeDeviceErrors": Case(
        {
            f'{ECC}event_type="mem_ecc_uncorrected"}}': (
                "0x60 1x20",
                None,
            ),
            f'{ECC}event_type="mem_ecc_corrected"}}': (
                None,
                "0x60 1x20",
            ),
        },
        "Device 2 (aws) of node n",
        "17m",
    ),
    "RegaugeTargetDown": Case(
        {
            'up{job="regauge-runs",instance="n:9464"}': ("1x60 0x20", None),
            'up{job="node",instance="n:9464"}': (None, "1x60 0x20"),
        },
        "n:9464",
    ),
    "RegaugeNoMetrics": Case(
        {'up{job="regauge-runs"}': ("1x80", None), 'regauge_run_info{run="a"}': (None, "1x80")},
        "No run",
    ),
    "RegaugeXidMissing": Case(
        {**DCGM, f"DCGM_FI_DEV_XID_ERRORS{GPU}": (None, "0x400")}, "errors would remain unseen"
    ),
    "RegaugeRankMetricsMissing": Case(
        {'regauge_run_info{run="a",verb="train"}': "1x80", STEPS: (None, "1x80")},
        "Run a exports no",
    ),
    "RegaugeDeviceMetricsVanished": Case(
        {**DCGM, f"DCGM_FI_DEV_GPU_TEMP{GPU}": ("50x40 stale", "50x400")}, "only 5 metrics left"
    ),
    "RegaugeDeviceGone": Case(
        {
            'DCGM_FI_DEV_GPU_UTIL{gpu="0",Hostname="n"}': ("50x80", "50x40 stale"),
            'DCGM_FI_DEV_GPU_UTIL{gpu="1",Hostname="n"}': "50x40 stale",
        },
        "Device 1 of node n",
    ),
    "RegaugeUtilizationAlwaysZero": Case(
        {**DCGM, f"DCGM_FI_DEV_GPU_UTIL{GPU}": ("0x400", "0x399 1"), STEPS: ("0+1x400", "5x400")},
        "Device 0 of node n reports 0",
        "40m",
    ),
    "RegaugeCounterAlwaysZero": Case(
        {STEPS: "0+1x80", 'regauge_train_tokens_total{run="a"}': ("0x80", "0+9x80")}, "always 0"
    ),
    "RegaugeServeErrors": Case(
        {
            'regauge_serve_requests_total{route="/embed",status="200",instance="s"}': "0+95x80",
            'regauge_serve_requests_total{route="/embed",status="503",instance="s"}': (
                "0+5x80",
                None,
            ),
            'regauge_serve_requests_total{route="/embed",status="422",instance="s"}': (
                None,
                "0+5x80",
            ),
        },
        "5%",
    ),
    "RegaugeServeQueueLong": Case(
        {'regauge_serve_queue_wait_seconds{model="m",instance="s"}': ("2x80", "0.5x80")}, "waits 2s"
    ),
    "RegaugeServeNoWorker": Case(
        {'regauge_serve_workers{model="m",instance="s"}': ("0x80", "1x80")}, "No worker of m"
    ),
    "RegaugeServeStartLong": Case(
        {
            'regauge_serve_draining{job="j",instance="s"}': "0x200",
            'regauge_serve_workers{job="j",model="m",instance="s"}': (None, "_x40 1x160"),
        },
        "s has been starting for 1800 s",
        "40m",
    ),
    "RegaugeServeDrainLong": Case(
        {'regauge_serve_draining{instance="s"}': ("1x80", "0x77 1x3")}, "for 60 s"
    ),
}


def test_every_alert_has_a_case() -> None:
    assert {rule["alert"] for rule in RULES} == set(CASES)


def test_every_alert_has_a_summary_a_remedy_and_a_severity() -> None:
    for rule in RULES:
        assert set(rule["annotations"]) == {"summary", "remedy"}
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}
        assert "<" not in rule["annotations"]["summary"]


@pytest.mark.parametrize("alert", CASES)
def test_an_alert_fires_on_its_condition_only(alert: str, tmp_path: Path) -> None:
    case = CASES[alert]
    assert case.text in find_alerts(tmp_path, alert, case.select(0), case.at)
    assert find_alerts(tmp_path, alert, case.select(1), case.at) == ""


def test_a_slow_evaluation_that_still_beats_is_progress(tmp_path: Path) -> None:
    series = {
        'regauge_rank_step_timestamp_seconds{run="a",rank="0"}': "10x80",
        'regauge_rank_beat_timestamp_seconds{run="a",rank="0"}': "0+15x80",
        'regauge_rank_phase{run="a",rank="0",phase="evaluate"}': "1x80",
        'regauge_rank_silence_limit_seconds{run="a",rank="0"}': "60x80",
    }
    assert find_alerts(tmp_path, "RegaugeNoProgress", series, "20m") == ""
    series['regauge_rank_beat_timestamp_seconds{run="a",rank="0"}'] = "10x80"
    assert "Run a" in find_alerts(tmp_path, "RegaugeNoProgress", series, "20m")


def test_a_compile_phase_within_its_limit_is_progress(tmp_path: Path) -> None:
    series = {
        'regauge_rank_beat_timestamp_seconds{run="a",rank="0"}': "10x80",
        'regauge_rank_phase{run="a",rank="0",phase="compile"}': "1x80",
        'regauge_rank_silence_limit_seconds{run="a",rank="0"}': "900x80",
    }
    assert find_alerts(tmp_path, "RegaugeNoProgress", series, "12m") == ""
    assert "Run a" in find_alerts(tmp_path, "RegaugeNoProgress", series, "16m")


def build_two_runs() -> dict[str, str]:
    """Return two runs of one name: one makes steps, and the other has stopped after 10 minutes."""
    series = {}
    for run_id, is_stopped in (("1", False), ("2", True)):
        labels = f'run="model",run_id="{run_id}"'
        times = "0+15x40 600x40" if is_stopped else "0+15x80"
        for name in ("step", "beat"):
            series[f'regauge_rank_{name}_timestamp_seconds{{{labels},rank="0"}}'] = times
        series[f'regauge_rank_step{{{labels},rank="0"}}'] = "0+15x80"
        delay = "0.25x80" if is_stopped else "0x80"
        series[f'regauge_rank_straggler_delay_seconds{{{labels},rank="0"}}'] = delay
        for name, value in (("alive", 1), ("progressing", 1), ("healthy", 0)):
            series[f'regauge_rank_{name}{{{labels},rank="0"}}'] = f"{value}x80"
        series[f"regauge_run_cost_usd_total{{{labels}}}"] = "95x80" if is_stopped else "10x80"
        series[f"regauge_run_budget_usd{{{labels}}}"] = "100x80"
    return series


@pytest.mark.parametrize("alert", ["RegaugeNoProgress", "RegaugeStraggler", "RegaugeBudgetNear"])
def test_two_runs_with_one_name_are_apart(alert: str, tmp_path: Path) -> None:
    report = find_alerts(tmp_path, alert, build_two_runs(), "19m")
    assert 'run_id="2"' in report
    assert 'run_id="1"' not in report


def test_the_panel_of_ranks_shows_two_runs_with_one_name(tmp_path: Path) -> None:
    panel = list_expressions(build_dashboards()["regauge-training"])[0].replace("$run", ".+")
    report = find_values(tmp_path, panel, build_two_runs(), "19m")
    assert report.count('run="model"') == report.count(" 2E+00") == 2


def test_a_stopped_rank_is_named_if_another_one_was_silent_before(tmp_path: Path) -> None:
    """A rank may wait for the others before one of them is stopped."""
    series = {
        'regauge_rank_beat_timestamp_seconds{run="a",rank="0"}': "10x80",
        'regauge_rank_beat_timestamp_seconds{run="a",rank="1"}': "11x80",
        'regauge_rank_stopped{run="a",rank="0"}': "0x80",
        'regauge_rank_stopped{run="a",rank="1"}': "1x80",
    }
    assert "Rank 1 " in find_alerts(tmp_path, "RegaugeNoProgress", series, "20m")
    series['regauge_rank_stopped{run="a",rank="1"}'] = "0x80"
    assert "Rank 0 " in find_alerts(tmp_path, "RegaugeNoProgress", series, "20m")


def test_a_run_that_never_does_a_step_is_stuck(tmp_path: Path) -> None:
    series = {'regauge_rank_beat_timestamp_seconds{run="a",rank="0"}': "10x80"}
    assert "Run a" in find_alerts(tmp_path, "RegaugeNoProgress", series, "20m")


@pytest.mark.parametrize(
    "series",
    [
        {f"DCGM_FI_DEV_XID_ERRORS{GPU}": "_x60 79x20"},
        {
            'DCGM_FI_DEV_XID_ERRORS{gpu="0",Hostname="n",err_code="13"}': "13x60 stale",
            'DCGM_FI_DEV_XID_ERRORS{gpu="0",Hostname="n",err_code="79"}': "_x60 79x20",
        },
        {'dcgm_xid_errors{gpu="0",hostname="n"}': "0x60 79x20"},
        {
            'DCGM_FI_DEV_XID_ERRORS{gpu="0",Hostname="n",pod="a"}': "0x30 stale",
            'DCGM_FI_DEV_XID_ERRORS{gpu="0",Hostname="n"}': "_x30 0x30 79x20",
        },
        {'regauge_device_error_code{device="0",instance="n:9464"}': "0x60 79x20"},
    ],
    ids=["absent before", "code as a label", "old name", "without the pod", "kernel's log"],
)
def test_an_xid_fires_for_every_version_of_the_exporter(
    series: dict[str, str], tmp_path: Path
) -> None:
    assert "error 79" in find_alerts(tmp_path, "RegaugeXid", series, "16m")


def test_a_cleared_xid_does_not_fire(tmp_path: Path) -> None:
    series = {f"DCGM_FI_DEV_XID_ERRORS{GPU}": "79x60 0x20"}
    assert find_alerts(tmp_path, "RegaugeXid", series, "16m") == ""


def test_a_repeated_xid_of_the_log_of_the_kernel_fires(tmp_path: Path) -> None:
    device = '{device="0",instance="n:9464"}'
    series = {
        f"regauge_device_error_code{device}": "31x80",
        f"regauge_device_errors_total{device}": "1x60 2x20",
    }
    assert "Device 0 (regauge) of node n" in find_alerts(
        tmp_path, "RegaugeDeviceErrors", series, "17m"
    )


def test_promtool_accepts_the_rules(tmp_path: Path) -> None:
    command = [require_promtool(), "check", "rules", *write_rules(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_damaged_rule_file_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    require_promtool()
    folder = tmp_path / "m"
    assert main(["monitor", "check", str(folder)]) == 2
    assert "regauge monitor write" in capsys.readouterr().err
    assert main(["monitor", "write", str(folder)]) == 0
    assert main(["monitor", "check", str(folder)]) == 0
    path = folder / "rules" / "alerts.yaml"
    path.write_text(path.read_text().replace("regauge_rank_alive == 0", "regauge_rank_alive =="))
    capsys.readouterr()
    assert main(["monitor", "check", str(folder)]) == 64
    assert "parse error" in capsys.readouterr().err
