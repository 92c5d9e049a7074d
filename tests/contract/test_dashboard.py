"""Whatever asks for our metrics asks for some that are there: the dashboard, the autoscaler, the names given to others."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.contract.compiler.conftest import start  # noqa: F401 - a fixture
from tests.contract.runtime.conftest import generate, serve
from tests.support.scrape import Scrape, scrape

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "deploy/components/monitoring"
ADDRESS = "127.0.0.1:0"
FROM_KUBERNETES = {"namespace", "pod", "le"}
"""Labels that Prometheus adds to what it scrapes, and the one every histogram has."""


def dashboard() -> str:
    return (MONITORING / "dashboard.json").read_text()


def queries(board: str) -> list[str]:
    parsed = json.loads(board)
    variables = [v["query"]["query"] for v in parsed["templating"]["list"] if v["type"] == "query"]
    return variables + [target["expr"] for panel in parsed["panels"] for target in panel.get("targets", ())]


def names_in(text: str) -> set[str]:
    return set(re.findall(r"\b(?:quire_(?:runtime|compiler)|process)_[a-z_]+\b", text))


def labels_in(query: str) -> set[str]:
    selectors = re.findall(r"(\w+)\s*=~?\s*\"", query)
    grouped = [label.strip() for group in re.findall(r"\bby \(([^)]*)\)", query) for label in group.split(",")]
    return {*selectors, *grouped}


def faults(board: str, seen: Scrape) -> Iterator[str]:
    for query in queries(board):
        names = names_in(query)
        if not names:
            yield f"asks for nothing of ours: {query}"
        for name in names - seen.names:
            yield f"no metric {name}: {query}"
        for name in names & seen.names:
            labels = {label for series in seen.series(name) for label in series}
            for label in labels_in(query) - labels - FROM_KUBERNETES:
                yield f"{name} has no label {label}: {query}"


@pytest.fixture
async def seen(tmp_path, start) -> Scrape:  # noqa: F811
    """Both services after a request and a job that failed, then one that was answered by an earlier one."""
    async with serve(tmp_path / "runtime", metrics_address=ADDRESS) as served:
        await served.load()
        await served.events(generate([1, 2, 3]))
        runtime = await scrape(served.runtime.metrics.address)
    async with start(metrics_address=ADDRESS) as client:
        client.source("m", report=[["fetch", 0.0, "m"]], end="built", reused=True)
        await client.end_of((await client.create(client.spec("m"))).job.job_id)
        while not (compiler := await scrape(client.compiler.metrics.address)).series("quire_compiler_attempts_total"):
            pass
    return Scrape(runtime.samples | compiler.samples, runtime.types | compiler.types)


async def test_every_metric_that_is_asked_for_exists_and_every_one_is_asked_for(seen):
    board = dashboard()
    assert list(faults(board, seen)) == []
    renamed = board.replace("quire_runtime_steps_total", "quire_runtime_step_total")
    assert [fault.partition(":")[0] for fault in faults(renamed, seen)] == ["no metric quire_runtime_step_total"]
    relabelled = board.replace("sum by (state) (quire_runtime_kv_pages", "sum by (status) (quire_runtime_kv_pages")
    assert [fault.partition(":")[0] for fault in faults(relabelled, seen)] == ["quire_runtime_kv_pages has no label status"]

    scaled_on = [m["pods"]["metric"]["name"] for m in yaml.safe_load((MONITORING / "hpa.yaml").read_text())["spec"]["metrics"]]
    assert scaled_on
    assert set(scaled_on) <= seen.names
    adapter = yaml.safe_load((ROOT / "deploy/tools/prometheus_adapter.yaml").read_text())["rules"]["custom"]
    assert [rule["seriesQuery"].partition("{")[0] for rule in adapter] == scaled_on
    documented = names_in((ROOT / "runtime_service/README.md").read_text())
    assert documented
    assert documented <= seen.names

    # And the other way round: a figure nobody looks at is not worth keeping.
    asked = {name for query in queries(board) for name in names_in(query)}
    ours = {name for name in seen.names if name.startswith("quire_") and not name.endswith(("_created", "_sum", "_count"))}
    assert ours - asked == set()
