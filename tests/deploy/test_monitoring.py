"""Prometheus, alerts and dashboard may only use metrics that the router exports, and labels that these have."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from homing.router.backend import ReplicaView
from homing.router.metrics import FAMILIES

from .files import DEPLOY, read_yaml

MONITORING = DEPLOY / "monitoring"
CONFIGS = sorted(path.name for path in (MONITORING / "prometheus").glob("*.yaml") if path.name != "alerts.yaml")
DASHBOARD = MONITORING / "grafana" / "dashboards" / "homing.json"
METRIC = re.compile(r"\b(homing_\w+)(\{[^}]*\})?")
#: Labels that Prometheus adds to every sample.
TARGET_LABELS = {"job", "instance", "cluster", "namespace"}
#: Replica states, a closed list in the code.
STATES = set(ReplicaView.__annotations__["state"].__args__)


def exported() -> dict[str, set[str]]:
    """Every series with its labels. `tests/router/test_metrics.py` checks the table against the exported metrics."""
    series: dict[str, set[str]] = {}
    for family in FAMILIES:
        known = set(family.labels) | TARGET_LABELS
        if family.kind == "histogram":
            series |= {f"{family.name}_{part}": known for part in ("sum", "count")}
            series[f"{family.name}_bucket"] = known | {"le"}
        else:
            series[f"{family.name}_total" if family.kind == "counter" else family.name] = known
    return series


def rules() -> list[dict[str, Any]]:
    return [rule for group in read_yaml("monitoring/prometheus/alerts.yaml")["groups"] for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]


def queries() -> Iterator[str]:
    """All Prometheus queries of the alerts and the dashboard."""
    yield from (rule["expr"] for rule in rules())
    yield from (target["expr"] for panel in panels() for target in panel["targets"])
    yield from (
        variable["query"]["query"]
        for variable in json.loads(DASHBOARD.read_text())["templating"]["list"]
        if variable["type"] == "query"
    )


def test_every_alert_links_to_its_section_of_the_runbook() -> None:
    """Whoever is woken at night must not search."""
    sections = re.findall(r"^## (\w+)$", (DEPLOY.parent / "docs" / "runbook.md").read_text(), re.MULTILINE)

    assert [rule["alert"] for rule in rules()] == sections
    for rule in rules():
        assert rule["annotations"]["runbook"] == f"docs/runbook.md#{rule['alert'].lower()}"


@pytest.mark.parametrize("query", sorted(set(queries())))
def test_a_query_names_series_and_labels_that_are_exported(query: str) -> None:
    """A renamed metric must not silently empty a panel or disable an alert."""
    series = exported()
    names = [name for name, _ in METRIC.findall(query)]
    grouped = {label.strip() for group in re.findall(r"\bby \(([^)]*)\)", query) for label in group.split(",")}

    assert [name for name in names if name not in series] == []
    for name, matchers in METRIC.findall(query):
        assert set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers)) <= series[name]
        assert grouped <= series[name]


def test_compared_states_are_states_of_replicas() -> None:
    """A misspelt label value would never match anything."""
    compared = re.findall(r'state=~?"([^"]*)"', "\n".join(queries()))

    assert compared
    assert {state for words in compared for state in words.split("|")} <= STATES


def test_every_metric_is_on_the_dashboard_or_in_an_alert() -> None:
    """A metric that is shown nowhere goes unnoticed, so a new metric needs a panel or an alert."""
    asked = {name for query in queries() for name, _ in METRIC.findall(query)}
    families = {re.sub(r"_(sum|count|bucket)$", "", name) for name in exported()}

    assert {name for name in families if name not in asked and f"{name}_bucket" not in asked} == set()


def test_panels_follow_the_chosen_model_and_router() -> None:
    """Otherwise a panel would show other models' figures under the chosen model's name."""
    series = exported()
    for panel in panels():
        for name, matchers in (found for target in panel["targets"] for found in METRIC.findall(target["expr"])):
            assert 'instance=~"$instance"' in matchers, panel["title"]
            assert ('model=~"$model"' in matchers) == ("model" in series[name]), panel["title"]


def test_every_alert_says_what_happened_and_what_to_do() -> None:
    """Alerts are read at night, under stress."""
    for rule in rules():
        assert rule["labels"]["severity"] in ("page", "ticket"), rule["alert"]
        assert set(rule["annotations"]) == {"summary", "remedy", "runbook"}, rule["alert"]
    assert len({rule["alert"] for rule in rules()}) == len(rules())


def test_panels_lie_beside_each_other_and_say_what_they_show() -> None:
    """Grafana draws overlapping panels on top of each other."""
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not taken & cells, panel["title"]
        assert at["x"] + at["w"] <= 24, panel["title"]
        assert panel["description"], panel["title"]
        taken |= cells


def test_panels_have_ids_of_their_own() -> None:
    """Links and renders address a panel by its id."""
    ids = [panel["id"] for panel in json.loads(DASHBOARD.read_text())["panels"]]

    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("name", CONFIGS)
def test_promtool_accepts_the_configuration(name: str, tmp_path: Path) -> None:
    """Prometheus' own parser, alerts included.

    Debian builds it without Kubernetes discovery, so static targets replace that section and the rest is parsed.
    """
    config = read_yaml(f"monitoring/prometheus/{name}")
    for job in config["scrape_configs"]:
        if job.pop("kubernetes_sd_configs", None) == [{"role": "pod"}]:
            job["static_configs"] = [{"targets": ["192.0.2.1:8000"]}]
    (tmp_path / name).write_text(yaml.safe_dump(config))
    shutil.copy(MONITORING / "prometheus" / "alerts.yaml", tmp_path)

    checked = promtool("check", "config", str(tmp_path / name))

    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_alerts_fire_when_they_should(tmp_path: Path) -> None:
    """Prometheus' own evaluation of the rules over synthetic series (alerts_test.yaml)."""
    shutil.copy(MONITORING / "prometheus" / "alerts.yaml", tmp_path)
    shutil.copy(Path(__file__).with_name("alerts_test.yaml"), tmp_path)

    tested = promtool("test", "rules", str(tmp_path / "alerts_test.yaml"))

    assert tested.returncode == 0, tested.stdout + tested.stderr


def promtool(*words: str) -> "subprocess.CompletedProcess[str]":
    """Run Prometheus' own tool, or skip the test if it is not installed."""
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not on the PATH: apt-get install prometheus")
    return subprocess.run(["promtool", *words], capture_output=True, text=True, check=False)
