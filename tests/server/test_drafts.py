"""Drafts through the server: replies are the same, what they bring is shown, and a model is
measured once the server is quiet.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from store.measured import measured_in

from mlx_blockpool.drafts.curve import CostCurve
from mlx_blockpool.engine import measuring
from mlx_blockpool.kv.cost_model import PathCosts
from mlx_blockpool.server.jobs import between_steps
from mlx_blockpool.server.options import server_config
from server.serving import Client, at_once, blockpool_server, parse, text_of, until

pytestmark = pytest.mark.server(model="endless")

# Sixteen rows cost little more than one.
FLAT = CostCurve.from_points({1: 0.010, 2: 0.011, 20: 0.012}, {1: 0.010, 2: 0.011})
# Of decode paths.
COSTS = PathCosts(1e-4, 1e-6, (1e-4, 1e-4, 0.0, 1e-6, 1e-6, 0.0))
QUESTION = [{"role": "user", "content": "Once more. " * 12}]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The pools that are measured, each with the same result."""
    found: list[Any] = []

    def measure(model: Any, arena: Any, **_: Any) -> CostCurve:
        found.append(arena)
        return FLAT

    monkeypatch.setattr(measuring, "measure_curve", measure)
    monkeypatch.setattr(measuring, "measure_paths", lambda *_, **__: {0: COSTS})
    return found


def report(client: Client) -> dict[str, Any]:
    found: dict[str, Any] = client.send("/v1/cache")[1]["drafts"]
    return found


def replies(client: Client) -> list[str]:
    """Greedy and seeded replies to one question, twice: the second time it is known what has
    followed the question.
    """
    options: list[dict[str, Any]] = [
        {"user": "ann"},
        {"temperature": 0.7, "seed": 5},
        {"logprobs": True},
    ]
    jobs = [lambda own=own: client.chat(QUESTION, max_tokens=120, **own) for own in options]
    found = [text_of(answer) for answer in [*at_once(jobs), *at_once(jobs)]]
    client.settle()
    return found


def test_replies_with_drafts_are_those_without_and_the_figures_say_what_was_drafted(
    model: Path,
) -> None:
    with blockpool_server(model, "--pool-bytes", "20MB", "--drafts", "off") as client:
        expected = replies(client)
        assert report(client) == {
            "mode": "off",
            "off": "drafts are off",
            "verifies": "rows",
            "curve": None,
            "verifications": 0,
            "drafted": 0,
            "accepted": 0,
            "sources": {},
            "head": None,
        }
    with blockpool_server(model, "--pool-bytes", "20MB", "--drafts", "6") as client:
        assert replies(client) == expected
        found = report(client)
        assert (found["mode"], found["off"], found["curve"]) == (6, None, None)
        sources = found["sources"]
        assert 0 < found["accepted"] == sum(source["accepted"] for source in sources.values())
        assert (
            found["accepted"]
            <= found["drafted"]
            == sum(source["drafted"] for source in sources.values())
        )
        assert 0 < found["verifications"] <= found["drafted"]
        counts = client.generator.model.events.counts
        assert counts.drafted == {name: source["drafted"] for name, source in sources.items()}
        assert counts.accepted == {name: source["accepted"] for name, source in sources.items()}
        assert counts.verifications == found["verifications"]


def measure(client: Client) -> None:
    """Wait until the model is measured, as if the server had been quiet for long."""
    registry = client.generator.registry
    registry.config = replace(registry.config, quiet_seconds=0.0)
    client.chat(QUESTION, max_tokens=1)
    caches = client.generator.model.caches
    # Not while it is measured, when nothing is left to measure unless a request stops it.
    until(lambda: between_steps(client.generator, lambda: not caches.is_unmeasured))
    client.settle()


def test_a_model_is_measured_once_and_drafts_as_that_says(
    model: Path, tmp_path: Path, measured: list[Any]
) -> None:
    options = ("--pool-bytes", "20MB", "--measure", "auto", "--store-dir", str(tmp_path))
    for _ in range(2):
        with blockpool_server(model, *options) as client:
            measure(client)
            replies(client)
            found = report(client)
            assert (found["mode"], found["off"], found["curve"]) == (
                "auto",
                None,
                json.loads(json.dumps(FLAT.to_json())),
            )
            assert found["accepted"] > 0
            assert client.send("/v1/cache")[1]["decode_costs"] == json.loads(
                json.dumps({"0": asdict(COSTS)})
            )
        assert len(measured) == 1
    (remembered,) = measured_in(tmp_path)
    assert remembered.model == model.name


def test_nothing_is_drafted_by_a_curve_that_was_not_measured(
    model: Path, measured: list[Any]
) -> None:
    with blockpool_server(model, "--pool-bytes", "20MB") as client:
        replies(client)
        found = report(client)
        assert (found["off"], found["drafted"]) == ("it was not measured what forwards cost", 0)
    assert measured == []


def test_a_model_that_fails_when_it_is_measured_is_served_without_figures(
    model: Path, measured: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> CostCurve:
        measured.append("failed")
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(measuring, "measure_curve", fail)
    with blockpool_server(model, "--pool-bytes", "20MB", "--measure", "auto") as client:
        measure(client)
        replies(client)
        found = report(client)
        assert (found["mode"], found["curve"], found["drafted"]) == ("auto", None, 0)
        assert (
            found["off"] == "it was not measured what forwards cost: RuntimeError: no such kernel"
        )
    assert measured == ["failed"]


def test_no_forwards_are_measured_for_drafts_whose_number_is_given(
    model: Path, measured: list[Any]
) -> None:
    with blockpool_server(
        model, "--pool-bytes", "20MB", "--drafts", "3", "--measure", "auto"
    ) as client:
        measure(client)
        replies(client)
        found = report(client)
        assert (found["mode"], found["off"], found["curve"]) == (3, None, None)
        assert found["accepted"] > 0
        assert client.send("/v1/cache")[1]["decode_costs"] == json.loads(
            json.dumps({"0": asdict(COSTS)})
        )
    assert measured == []


def test_nothing_is_measured_for_drafts_that_are_off_and_without_a_store_each_server_measures_once(
    model: Path, tmp_path: Path, measured: list[Any]
) -> None:
    options = (
        "--pool-bytes",
        "20MB",
        "--measure",
        "auto",
        "--drafts",
        "off",
        "--store-dir",
        str(tmp_path),
    )
    with blockpool_server(model, *options) as client:
        measure(client)
    assert measured == []
    assert [list(found.figures) for found in measured_in(tmp_path)] == [["paths"]]
    for count in (1, 2):
        with blockpool_server(
            model, "--pool-bytes", "20MB", "--drafts", "auto", "--measure", "auto"
        ) as client:
            measure(client)
            assert client.send("/admin/unload", {"model": str(model)})[0] == 200
            client.chat(QUESTION, max_tokens=1)
            assert client.generator.registry.counts["loads"] == 2
        assert len(measured) == count


@pytest.mark.parametrize(
    ("text", "drafts"), [("auto", "auto"), ("off", "off"), ("1", 1), ("16", 16)]
)
def test_the_option_is_auto_off_or_a_number(text: str, drafts: Any) -> None:
    assert server_config(parse([])).engine.drafts == "auto"
    assert server_config(parse(["--drafts", text])).engine.drafts == drafts


@pytest.mark.parametrize("text", ["0", "17", "-1", "on", "", "1.5"])
def test_another_word_or_number_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises((SystemExit, argparse.ArgumentTypeError)):
        parse(["--drafts", text])
    assert "neither auto nor off nor a number from 1 to 16" in capsys.readouterr().err
