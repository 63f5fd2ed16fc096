"""The files of `monitor write`: manifests, objects of the Prometheus operator, settings."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch.schemas import find_core_problems
from monitor.node_packages import require_packages, run_node
from regauge.cli import main
from regauge.monitoring.bundle import build_manifests, list_exporters
from regauge.monitoring.dashboard_files import build_dashboards, list_expressions
from regauge.monitoring.local_prometheus import find_scrape_targets
from regauge.monitoring.prometheus_settings import Prometheus
from regauge.monitoring.rule_files import FOLDER, load_vocabulary, load_yaml
from regauge.monitoring.vocabulary import METRICS, PREDICT_STATES

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "alerts.md"
PLACEHOLDER = re.compile(r"\{\{ \$(?:labels\.)?(\w+)(?: \| \w+)? \}\}")
MANIFESTS = build_manifests(Prometheus(run_port=9470))
OPERATOR_KINDS = ("PodMonitor", "PrometheusRule")
PROGRAM = """
import { monitoringCoreosCom } from "@kubernetes-models/prometheus-operator";
const document = JSON.parse(process.argv[2]);
new monitoringCoreosCom.v1[document.kind](document).validate();
"""


def list_documents(*kinds: str) -> list[dict[str, Any]]:
    """Return the documents of some kinds; without kinds, those of Kubernetes itself."""
    documents = [item for text in MANIFESTS.values() for item in yaml.safe_load_all(text)]
    chosen = kinds or {item["kind"] for item in documents} - {*OPERATOR_KINDS}
    return [item for item in documents if item["kind"] in chosen]


@pytest.mark.parametrize("version", ["1.34", "1.36"])
def test_every_manifest_is_strictly_valid(version: str) -> None:
    documents = list_documents()
    assert {item["kind"] for item in documents} == {"ConfigMap", "DaemonSet"}
    for document in documents:
        assert find_core_problems(document, version) == [], document["metadata"]["name"]


def find_operator_problems(document: dict[str, Any]) -> str:
    """Return what the definitions of the Prometheus operator do not allow; empty if it is valid."""
    name = "@kubernetes-models/prometheus-operator"
    packages = require_packages(name, proof="that the Prometheus operator accepts the objects")
    program = packages / "validate.mjs"
    program.write_text(PROGRAM)
    return run_node("node", program, json.dumps(document))


@pytest.mark.full
def test_the_prometheus_operator_accepts_its_objects() -> None:
    documents = list_documents(*OPERATOR_KINDS)
    assert len(documents) == 3
    for document in documents:
        assert find_operator_problems(document) == "", document["metadata"]["name"]


def test_a_wrong_field_of_an_object_is_refused() -> None:
    (document, *_) = list_documents("PodMonitor")
    document["spec"]["podMetricsEndpoints"][0]["relabelings"][0]["action"] = "move"
    assert "action" in find_operator_problems(document)


def test_a_monitor_of_runs_reads_the_port_of_the_settings() -> None:
    runs = next(
        item for item in list_documents("PodMonitor") if item["metadata"]["name"] == "regauge-runs"
    )
    assert runs["spec"]["selector"]["matchLabels"] == {"app.kubernetes.io/managed-by": "regauge"}
    text = json.dumps(runs)
    assert "$1:9470" in text
    assert "__meta_kubernetes_pod_node_name" in text


def test_every_exporter_is_selected_by_a_monitor() -> None:
    exporters = {
        name for vendor in ("nvidia", "neuron", "gaudi") for name in list_exporters(vendor)
    }
    assert exporters == {
        "dcgm-exporter.yaml",
        "gaudi-exporter.yaml",
        "neuron-monitor.yaml",
        "nvtop.yaml",
    }
    for name in exporters - {"nvtop.yaml"}:
        (daemon,) = (
            item for item in yaml.safe_load_all(MANIFESTS[name]) if item["kind"] == "DaemonSet"
        )
        template = daemon["spec"]["template"]
        assert template["metadata"]["labels"]["regauge/exporter"] == "true"
        (container,) = template["spec"]["containers"]
        assert container["ports"][0]["name"] == "metrics"
        assert not container["image"].endswith(":latest")


def test_the_counters_of_the_exporter_are_those_of_the_rules() -> None:
    sources = json.dumps([metric["sources"] for metric in load_vocabulary()["metrics"]])
    rules = set(re.findall(r"DCGM_[A-Z_]+", sources))
    assert rules == set(re.findall(r"DCGM_(?!EXPORTER)[A-Z_]+", MANIFESTS["dcgm-exporter.yaml"]))


def test_rules_and_dashboards_use_metrics_of_the_vocabulary(tmp_path: Path) -> None:
    assert main(["monitor", "write", str(tmp_path / "m")]) == 0
    text = "".join(
        path.read_text()
        for path in (tmp_path / "m").rglob("*")
        if path.suffix in {".yaml", ".json"}
    )
    names = set(
        re.findall(r"\bregauge_(?:run|rank|train|predict|serve|device|evaluation)_\w+", text)
    )
    known = {metric.name for metric in METRICS}
    known |= {f"{name}_{end}" for name in known for end in ("bucket", "sum", "count")}
    assert names <= known
    assert len(names) > 40


def test_dashboards_select_states_that_prediction_exports() -> None:
    expressions = list_expressions(build_dashboards()["regauge-prediction"])
    states = [state for text in expressions for state in re.findall(r'state="(\w+)"', text)]
    assert states
    assert set(states) <= set(PREDICT_STATES)


def test_files_are_not_replaced_without_a_flag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["monitor", "write", str(tmp_path / "m"), "--json"]
    assert main([*command, "--dry-run"]) == 0
    assert not (tmp_path / "m").exists()
    assert main(command) == 0
    capsys.readouterr()
    assert main(command) == 2
    assert "add --overwrite" in capsys.readouterr().out
    assert main([*command, "--overwrite"]) == 0


def test_a_run_file_sets_the_thresholds(tmp_path: Path) -> None:
    run_file = tmp_path / "run.toml"
    run_file.write_text('[prometheus.alerts]\nprogress_seconds = 60\n[output]\nfolder = "out"\n')
    command = ["monitor", "write", str(tmp_path / "m"), "--run-file", str(run_file)]
    assert main([*command, "prometheus.alerts.goodput_ratio=0.7"]) == 0
    text = (tmp_path / "m" / "rules" / "alerts.yaml").read_text()
    assert "> 60" in text
    assert "regauge_run_goodput_ratio < 0.7" in text


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("prometheus.alerts.progres_seconds=1", "progress_seconds"),
        ("prometheus.alerts.goodput_ratio=2", "goodput_ratio"),
        ('prometheus.targets=["http://a:1/x"]', "write it as localhost:9400"),
        ('prometheus.servers=["a"]', "write it as localhost:9400"),
        ("prometheus.webhook=hooks", "write it as https://host/path"),
    ],
)
def test_wrong_settings_are_one_line(
    assignment: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["monitor", "write", str(tmp_path / "m"), assignment]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "m").exists()


def test_targets_are_found_in_runs_and_stages(tmp_path: Path) -> None:
    for number, folder in enumerate((".", "a", "b/2-train", "c/d/e")):
        path = tmp_path / folder / "exporters" / "rank-0.json"
        path.parent.mkdir(parents=True)
        group = {"targets": [f"10.0.0.{number}:9464"], "labels": {"node": f"node-{number}"}}
        path.write_text(json.dumps([group]))
    for name, text in (("empty", ""), ("damaged", '[{"targets": '), ("other", '{"targets": 1}')):
        path = tmp_path / name / "exporters" / "rank-0.json"
        path.parent.mkdir(parents=True)
        path.write_text(text)
    groups = find_scrape_targets(tmp_path)
    assert [group["targets"] for group in groups] == [[f"10.0.0.{n}:9464"] for n in range(4)]
    assert groups[1]["labels"] == {"node": "node-1"}


def test_a_server_with_api_keys_gets_the_key(tmp_path: Path) -> None:
    key, folder = tmp_path / "key.txt", tmp_path / "m"
    key.write_text("secret\n")
    changes = ['prometheus.servers=["a:8080"]', f"prometheus.server_key_file={key}"]
    assert main(["monitor", "write", str(folder), 'prometheus.targets=["b:9400"]', *changes]) == 0
    text = (folder / "prometheus.yml").read_text()
    jobs = {job["job_name"]: job for job in yaml.safe_load(text)["scrape_configs"]}
    assert jobs["regauge-servers"]["authorization"] == {"credentials_file": str(key)}
    assert "authorization" not in jobs["regauge-targets"]
    assert "secret" not in text
    if shutil.which("promtool"):
        assert main(["monitor", "check", str(folder)]) == 0


def build_alert_table() -> str:
    """Return the table of alerts in Markdown; thresholds are in angle brackets."""
    lines = ["| Alert | Severity | Message | What to do |", "| --- | --- | --- | --- |"]
    for group in load_yaml(FOLDER / "alerts.yaml")["groups"]:
        for alert in group["alerts"]:
            texts = [PLACEHOLDER.sub(r"*\1*", alert[name]) for name in ("summary", "remedy")]
            escaped = (re.sub("<([a-z_]+)>", r"`<\1>`", text) for text in texts)
            lines.append(f"| `{alert['alert']}` | {alert['severity']} | {' | '.join(escaped)} |")
    return "\n".join(lines) + "\n"


def test_the_page_lists_every_alert_with_its_remedy() -> None:
    table = PAGE.read_text().partition("<!-- alerts -->\n")[2].partition("<!-- /alerts -->")[0]
    assert table == build_alert_table()
