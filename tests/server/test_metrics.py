"""GET /metrics: what Prometheus reads, what the documents say of it, and that the dashboard
shows only what there is.
"""

from __future__ import annotations

import errno
import http.client
import json
import math
import os
import threading
from typing import Any

import metrics_table
import pytest
import yaml
from documents import ROOT, blocks
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families
from promql import Query

from mlx_blockpool.ranks.head import Condition, Head
from mlx_blockpool.server.health import PAUSE_SECONDS, Health
from mlx_blockpool.server.jobs import Job
from mlx_blockpool.server.watch.metrics import OF_MODELS, OF_SERVER, PATH
from server.serving import Client

pytestmark = pytest.mark.server(
    "--pool-bytes 2MB --prefill-step-size 256", model="llama", keys="the-key\n", is_stored=True
)

TEXT = "There is a long story about a block. " * 8
DASHBOARD = json.loads(
    (ROOT / "mlx_blockpool/server/watch/grafana.json").read_text(encoding="utf-8")
)
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(server: Client, **headers: str) -> tuple[str, str]:
    """The type and text of a scrape."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        connection.request("GET", PATH, headers={"Authorization": "Bearer the-key", **headers})
        response = connection.getresponse()
        text = response.read().decode()
        assert response.status == 200, text
        return response.headers["Content-Type"], text
    finally:
        connection.close()


def samples(server: Client) -> Samples:
    families = list(text_string_to_metric_families(scrape(server)[1]))
    names = [
        (sample.name, frozenset(sample.labels.items()))
        for family in families
        for sample in family.samples
    ]
    assert len(names) == len(set(names)), "a sample is there twice"
    return {
        (s.name, frozenset(s.labels.items())): s.value
        for family in families
        for s in family.samples
    }


def chat(server: Client, text: str, agent: str) -> None:
    body = {"messages": [{"role": "user", "content": text}], "user": agent, "max_tokens": 4}
    assert server.send("/v1/chat/completions", body, headers={"x-api-key": "the-key"})[0] == 200


def total(found: Samples, name: str, **labels: str) -> float:
    return sum(
        value
        for (sample, own), value in found.items()
        if sample == name and labels.items() <= dict(own).items()
    )


def test_requests_are_counted(server: Client) -> None:
    before = samples(server)
    chat(server, f"{TEXT} One.", "ann")
    chat(server, f"{TEXT} Two.", "bob")
    server.settle()
    after = samples(server)

    def grown(name: str, **labels: str) -> float:
        return total(after, name, **labels) - total(before, name, **labels)

    assert grown("vllm:request_success_total", finished_reason="length") == 2
    assert grown("vllm:generation_tokens_total") == 8
    assert grown("vllm:prompt_tokens_total") == grown("vllm:prefix_cache_queries_total") > 500
    assert (
        grown("vllm:prefix_cache_hits_total")
        == grown("blockpool_hit_tokens_total", tier="memory")
        > 250
    )
    missed = grown("vllm:prefix_cache_queries_total") - grown("vllm:prefix_cache_hits_total")
    assert missed == grown("blockpool_missed_tokens_total")
    assert grown("blockpool_misses_total", cause="differs") >= 1
    assert grown("blockpool_misses_total") == 2
    observed = {
        "time_to_first_token": 2,
        "inter_token_latency": 6,
        "e2e_request_latency": 2,
        "request_queue_time": 2,
    }
    for name, count in observed.items():
        assert (
            grown(f"vllm:{name}_seconds_count")
            == grown(f"vllm:{name}_seconds_bucket", le="+Inf")
            == count
        )
        assert grown(f"vllm:{name}_seconds_sum") > 0
    assert grown("blockpool_step_seconds_count", kind="prefill") >= 2
    assert grown("blockpool_step_seconds_count", kind="decode") >= 8
    assert (
        total(after, "vllm:num_requests_running") == total(after, "vllm:num_requests_waiting") == 0
    )
    assert total(after, "blockpool_agents") >= 2
    states = [
        total(after, "blockpool_blocks", state=state) for state in ("free", "held", "evictable")
    ]
    assert (states[1], states[2] > 0) == (0, True)
    assert {
        dict(labels).get("model_name") for name, labels in after if name.startswith("vllm:")
    } == {server.generator.model.events.model}


def test_a_scrape_does_not_wait_for_the_generation_thread(server: Client) -> None:
    going_on, job = threading.Event(), Job(lambda: going_on.wait(60))
    server.generator.requests.put(job)
    assert "blockpool_blocks" in scrape(server)[1]
    assert job.results.empty()
    going_on.set()
    assert job.results.get(timeout=60) == (True, None)


def test_a_scrape_needs_the_key(server: Client) -> None:
    assert server.send(PATH)[0] == 401


def test_the_open_format_is_served_to_those_who_want_it(server: Client) -> None:
    kind, text = scrape(server, Accept="application/openmetrics-text; version=1.0.0")
    assert kind.startswith("application/openmetrics-text")
    names = {family.name for family in openmetrics.text_string_to_metric_families(text)}
    assert {figure.name for figure in (*OF_MODELS, *OF_SERVER)} <= names
    assert scrape(server)[0].startswith("text/plain")


def test_every_metric_is_reported_with_its_labels_and_help(server: Client) -> None:
    chat(server, TEXT, "ann")
    families = {family.name: family for family in text_string_to_metric_families(scrape(server)[1])}
    for figure, own in [
        *((figure, {"model_name"}) for figure in OF_MODELS),
        *((figure, set[str]()) for figure in OF_SERVER),
    ]:
        family = families[figure.name]
        assert (family.type, family.documentation) == (figure.kind, figure.help)
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == own | set(figure.labels)
            assert not math.isnan(sample.value)
    ours = {name for name in families if not name.startswith("process_")}
    assert ours == {figure.name for figure in (*OF_MODELS, *OF_SERVER)}


def test_what_ranks_say_of_themselves_is_reported(
    server: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def health() -> dict[str, Any]:
        found: dict[str, Any] = server.send("/health", headers={"x-api-key": "the-key"})[1]
        return found

    assert not any(name.startswith("blockpool_rank_") for name, _ in samples(server))
    assert "ranks" not in health()
    now = [0.0]
    condition = Condition(lambda: now[0])
    monkeypatch.setattr(server.generator.step_driver, "condition", condition)
    condition.note([Head(free_mb=3), Head(free_mb=2, takes=False)])
    condition.note([Head(free_mb=3), Head(free_mb=2, takes=False, problem=errno.ENOSPC, restore=7)])
    now[0] = 1.5
    found = samples(server)
    assert total(found, "blockpool_rank_exchanges_total") == 2
    assert total(found, "blockpool_rank_memory_bytes", rank="1") == 2 << 20
    takes = [total(found, "blockpool_rank_store_takes", rank=rank) for rank in "01"]
    errors = [total(found, "blockpool_rank_store_error", rank=rank) for rank in "01"]
    assert (takes, errors) == ([1, 0], [0, errno.ENOSPC])
    first = {"rank": 0, "store": "ok", "free_memory_bytes": 3 << 20, "restoring": False}
    second = {
        "rank": 1,
        "store": os.strerror(errno.ENOSPC),
        "free_memory_bytes": 2 << 20,
        "restoring": True,
    }
    assert (health()["ranks"], health()["seconds_since_exchange"]) == ([first, second], 1.5)
    condition.note([Head(), Head(takes=False)])
    assert [rank["store"] for rank in health()["ranks"]] == ["ok", "takes nothing now"]


def test_the_table_of_metrics_is_that_of_the_code() -> None:
    assert metrics_table.in_document() == metrics_table.render(), f"run {metrics_table.COMMAND}"


def test_the_scrape_config_is_for_this_server() -> None:
    [config] = [yaml.safe_load(text) for text in blocks("yaml prometheus.yml")]
    [job] = config["scrape_configs"]
    assert (job.get("metrics_path", "/metrics"), job["static_configs"]) == (
        PATH,
        [{"targets": ["127.0.0.1:8080"]}],
    )
    assert set(job["authorization"]) == {"credentials_file"}


# -- the dashboard ---------------------------------------------------------------------------------


def known_labels() -> dict[str, set[str]]:
    """The labels of each name that a query can read."""
    found = {}
    for figure, own in [
        *((figure, {"model_name"}) for figure in OF_MODELS),
        *((figure, set[str]()) for figure in OF_SERVER),
    ]:
        labels = own | set(figure.labels)
        if figure.kind == "histogram":
            found |= {
                f"{figure.name}_bucket": labels | {"le"},
                f"{figure.name}_sum": labels,
                f"{figure.name}_count": labels,
            }
        else:
            found[metrics_table.shown_name(figure)] = labels
    return found


def test_the_queries_of_the_dashboard_read_metrics_that_are_there() -> None:
    known = known_labels()
    variables = [
        Query(v["query"].replace(", model_name", ""))
        for v in DASHBOARD["templating"]["list"]
        if v["type"] == "query"
    ]
    for query in [*map(Query, QUERIES), *variables]:
        assert query.metrics
        for name, labels in query.metrics.items():
            assert labels <= known[name], f"{name} has no labels {labels - known[name]}"


def test_the_dashboard_shows_every_metric() -> None:
    shown = {name for text in QUERIES for name in Query(text).metrics}
    hidden = [
        f.name
        for f in (*OF_MODELS, *OF_SERVER)
        if not any(name.startswith(f.name) for name in shown)
    ]
    assert hidden == ["blockpool_info"]
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


@pytest.mark.parametrize("bad", ["sum(", "rate(a[1m]", "a{b}", "a)", "sum by (x) a", "a ; b"])
def test_a_query_that_is_none_is_found(bad: str) -> None:
    with pytest.raises(ValueError, match=r"expected|too much|bad character"):
        Query(bad)


# -- stalls ----------------------------------------------------------------------------------------


def test_stalls_are_counted_while_there_is_work() -> None:
    now = [0.0]
    health = Health(120.0, lambda: now[0])
    now[0] += 50
    health.doing("prefill and decode")
    now[0] += PAUSE_SECONDS / 2
    health.mark()
    assert (health.stalls, health.stalled_seconds) == (0, 0.0)
    now[0] += 7
    health.mark()
    now[0] += 3
    health.idle()
    now[0] += 60
    health.idle()
    assert (health.stalls, health.stalled_seconds) == (2, 10.0)
