"""The replay of recorded sessions: its workload, what it is compared with, and the real cache
between them.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import pytest
from documents import ROOT, TEXTS

from mlx_blockpool import demo

BENCHMARKS = ROOT / "benchmarks"
SESSIONS = (10, 11)
DIVISOR = 16


def imported(name: str, folder: Path) -> ModuleType:
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return imported("bench_sessions", BENCHMARKS)


@pytest.fixture(scope="module")
def runner() -> ModuleType:
    return imported("benchmarks.__main__", ROOT)


def test_the_figures_of_the_readmes_are_those_of_the_results(runner: ModuleType) -> None:
    machines = {path.stem: runner.read(path) for path in (BENCHMARKS / "results").glob("*.jsonl")}
    module = imported("benchmarks.figures", ROOT)
    figures = module.Figures(machines)
    for document in module.DOCUMENTS:
        assert figures.written(TEXTS[document], document == "README.md") == TEXTS[document]
    assert len(set(re.findall("<!-- (?:end of )?.* -->", TEXTS["benchmarks/README.md"]))) == 10
    assert "<!-- answers -->" in TEXTS["mlx_blockpool/server/quantised.md"]


def test_every_plot_is_drawn_and_shown(runner: ModuleType) -> None:
    shown = set(re.findall(r"!\[.*\]\(plots/(.*)\.svg\)", TEXTS["benchmarks/README.md"]))
    drawn = {path.stem for path in (BENCHMARKS / "plots").iterdir()}
    assert shown == drawn == set(imported("benchmarks.plots", ROOT).PLOTS)


def test_a_figure_of_another_machine_names_it(runner: ModuleType) -> None:
    module = imported("benchmarks.figures", ROOT)
    row = module.Row(
        "step", "b", ("x", "y"), "{ours_ms:.1f} ms", "{stock_ms:.1f} ms", "{times_ms:.1f}x"
    )
    x, y = (
        {"bench": "b", "case": case, "ours_ms": 2, "stock_ms": 5, "device": "Z80"} for case in "xy"
    )
    assert module.Figures({module.MACHINE: [x]}).row(row) == []
    assert module.Figures({module.MACHINE: [x, y]}).row(row) == [
        "step",
        "2.0 ms / 2.0 ms",
        "5.0 ms / 5.0 ms",
        "2.5x / 2.5x",
    ]
    newer = {**x, "ours_ms": 1, "device": "6502"}
    assert module.Figures({"a": [x, y], module.MACHINE: [newer]}).row(row)[:2] == [
        "step (Z80)",
        "1.0 ms / 2.0 ms",
    ]


def test_a_later_line_of_a_case_takes_the_place_of_an_earlier_one(
    runner: ModuleType, tmp_path: Path
) -> None:
    path = tmp_path / "machine.jsonl"
    runner.keep([{"bench": "b", "case": "x", "ms": 1}, {"bench": "b", "case": "y", "ms": 2}], path)
    runner.keep([{"bench": "b", "case": "x", "ms": 3}], path)
    assert runner.read(path) == [
        {"bench": "b", "case": "x", "ms": 3},
        {"bench": "b", "case": "y", "ms": 2},
    ]


def test_an_unknown_benchmark_is_an_error(
    runner: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        runner.main(["--quick", "pools"])
    assert "There is no benchmark pools." in capsys.readouterr().err


def test_recorded_prompts_begin_as_their_parents_do(bench: ModuleType) -> None:
    requests = list(bench.recorded(SESSIONS, DIVISOR))
    assert [request.at for request in requests] == sorted(request.at for request in requests)
    for i, request in enumerate(requests):
        earlier = [other.prompt.tolist() + other.output.tolist() for other in requests[:i]]
        shared = [
            next(
                (n for n, (a, b) in enumerate(zip(request.prompt, o, strict=False)) if a != b),
                len(o),
            )
            for o in earlier
        ]
        assert request.known == min(max(shared, default=0), len(request.prompt) - 1)


@pytest.mark.parametrize("kind", ["full", "window", "hybrid"])
def test_memory_for_all_reuses_what_is_known(bench: ModuleType, kind: str) -> None:
    blocks = bench.Blocks(bench.recorded(SESSIONS, DIVISOR))
    spec = bench.SPECS[kind]
    with bench.caches_of(
        spec, 4 * blocks.working_set * spec.bytes_per_block(spec.groups[0]), None
    ) as caches:
        reused = bench.replay(bench.recorded(SESSIONS, DIVISOR), caches).reused
        caches.prefix.check()
    assert reused >= (0.99 if kind == "full" else 0.9) * blocks.known


def test_the_order_of_eviction_is_between_plain_lru_and_the_optimum(bench: ModuleType) -> None:
    blocks = bench.Blocks(bench.recorded(SESSIONS, DIVISOR))
    capacity, spec = blocks.working_set * 3 // 4, bench.SPECS["full"]
    with bench.caches_of(spec, capacity * spec.bytes_per_block(spec.groups[0]), None) as caches:
        ours = bench.replay(bench.recorded(SESSIONS, DIVISOR), caches).reused
    plain, optimum = (
        bench.PlainLRU(blocks, capacity).reuse(),
        bench.Optimum(blocks, capacity).reuse(),
    )
    assert plain <= ours
    assert 0.9 * optimum <= ours <= blocks.known


def test_a_router_that_knows_blocks_sends_a_prompt_where_they_are() -> None:
    module = imported("bench_routers", BENCHMARKS)
    chosen, requests = module.rows(DIVISOR, SESSIONS), list(module.recorded(SESSIONS, DIVISOR))
    known, room = module.Blocks(requests), 1 << 40
    reused = {}
    for name, router in module.ROUTERS.items():
        with module.machines_of(2, room) as machines:
            routed = router(machines)
            first_tokens = module.simulate(chosen, requests, machines, routed)
            reused[name] = sum(machine.cached for machine in machines)
            assert len(first_tokens) == len(requests)
            if name == "by prefix":
                # One that only the events can have told it.
                last = requests[-1].prompt.tolist()
                routed.choose(requests[-1], 0.0)
                found = [
                    machine.caches.prefix.index.trie.match(last).tokens // 256 * 256
                    for machine in machines
                ]
                assert routed.cached(module.encode(last)) == found
    assert reused["in turns"] < min(reused["by session"], reused["by prefix"])
    assert reused["by prefix"] >= 0.99 * known.known


class Echo:
    """Stands for a server that has cached all of a prompt's beginning that it has seen, in
    tokens of a mark or a word.
    """

    def __init__(self, broken: bool = False) -> None:
        self.broken = broken
        self.seen: list[list[str]] = []

    def chat(
        self, messages: list[dict[str, str]], max_tokens: int, timeout: float
    ) -> tuple[str, float, dict[str, Any]]:
        if self.broken:
            raise TimeoutError("no token")
        parts = [
            [f"<{message['role']}>", *message["content"].split(), "<end>"] for message in messages
        ]
        prompt = [*(word for part in parts for word in part), "<assistant>"]
        shared = [
            next((n for n, (a, b) in enumerate(zip(prompt, old, strict=False)) if a != b), len(old))
            for old in self.seen
        ]
        reply = [f"w{len(self.seen)}"] * max_tokens
        self.seen.append([*prompt, *reply])
        usage = {
            "prompt_tokens": len(prompt),
            "prompt_tokens_details": {"cached_tokens": max(shared, default=0)},
        }
        return " ".join(reply), 0.1, usage


def replayed(server: Echo) -> tuple[list[Any], Any]:
    module = imported("bench_sessions_http", BENCHMARKS)
    requests = module.rows(DIVISOR, SESSIONS)
    client = module.Client(server, requests, 1e9, module.GRAIN // DIVISOR)
    for row in requests:
        client.send(row)
    return requests, client


def test_requests_over_http_have_the_recorded_lengths_and_beginnings() -> None:
    requests, client = replayed(Echo())
    assert not client.failures
    turns = [(row, client.turns[row.key]) for row in requests]
    assert [turn for row, turn in turns if turn.prompt_tokens != row.prompt] == []
    # Marks around what is known may be known too: the one behind it, and the next one before.
    assert {turn.cached - turn.known for _, turn in turns} <= {0, 1, 2}


def test_requests_without_a_reply_are_counted() -> None:
    requests, client = replayed(Echo(broken=True))
    assert client.failures == ["TimeoutError: no token"] * len(requests)
    assert not any(turn.reply for turn in client.turns.values())


@pytest.mark.thorough
def test_an_edit_is_the_part_of_a_file_with_one_name_replaced() -> None:
    module = imported("edits", BENCHMARKS)
    (work,) = module.edits([100])
    old, new = re.fullmatch(r".*: (\w+) -> (\w+)", work.name).groups()  # type: ignore[union-attr]
    size, text = len(work.reply), module.tokenizer().decode
    assert work.reply[-1] == module.END
    header = work.prompt[work.prompt.index(module.END) + 1 :]
    file = work.prompt[-size - len(header) : -len(header)]
    assert work.prompt[7:] == [*header, *file, *header]
    assert text(work.reply) == re.sub(rf"\b{old}\b", new, text(file)) != text(file)


@pytest.mark.thorough
def test_the_editor_writes_the_edit_and_the_text_that_it_reads() -> None:
    editor, module = imported("editor", BENCHMARKS), imported("edits", BENCHMARKS)
    for model in (editor.new_model(), editor.Hybrid(mx.bfloat16)):
        for work in module.edits([100]) + module.prose(60):
            logits = model(mx.array([[*work.prompt, *work.reply[:-1]]]))[0, len(work.prompt) - 1 :]
            assert mx.argmax(logits, axis=-1).tolist() == work.reply


def test_the_bound_takes_what_pays_of_the_tokens_that_will_be_accepted() -> None:
    bench = imported("bench_drafts", BENCHMARKS)
    work = bench.Work("twice", [*range(8), 100], [*range(6), 99])
    runs = bench.accepted_runs(work, 4)
    # Three tokens have to come again first.
    assert runs == [0, 0, 3, 2, 1, 0, 0]
    free, dear = (
        bench.CostCurve.from_points({1: 1.0, 4: 1.0}),
        bench.CostCurve.from_points({1: 1.0, 2: 2.0, 4: 4.0}),
    )
    assert bench.bound([runs], free) == pytest.approx(7 / 4)
    assert bench.bound([runs], dear) == pytest.approx(1.0)


class Words:
    """A tokenizer of words; a message ends with a mark."""

    def encode(self, text: str, **_: Any) -> list[int]:
        return [sum(map(ord, word)) for word in text.split()]

    def decode(self, tokens: list[int]) -> str:
        return " ".join(map(chr, tokens))

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> list[int]:
        return [token for each in messages for token in [*self.encode(each["content"]), 0]]


class OneReply:
    """Stands for a server that replies "one more"."""

    def __init__(self, peer: Any) -> None:
        self.peer = peer

    def computed(self) -> int:
        return 0

    def chat(self, messages: Any, max_tokens: int, stream: Any) -> Any:
        stream.add({"choices": [{"delta": {"content": "one more"}}]})
        return stream


def test_tokens_that_an_earlier_prompt_or_reply_began_with_are_not_distinct() -> None:
    module = imported("bench_peers", BENCHMARKS)
    talk = module.Talk(OneReply(module.PEERS[0]), Words(), quick=True)
    talk.turns("a b c", ["d e"])
    assert talk.distinct() == len(["a", "b", "c", 0, "d", "e", 0])
    talk.begin()
    # Of the first, the reply was known; of the second, only the system message.
    talk.turns("a b c", ["d e", "f"])
    talk.turns("a b c", ["g"])
    assert talk.distinct() == 0 + len([0, "f", 0]) + len(["g", 0])


def compared(names: str, model: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[Any]:
    """The lines of this server and mlx_lm.server in workloads of a model. No reply differs."""
    module = imported("bench_peers", BENCHMARKS)
    lines = folder / "lines.jsonl"
    options = ["--quick", "--only", f"ours,stock/{names}", "--model", model, "--out", str(lines)]
    monkeypatch.setattr(sys, "argv", ["bench_peers", *options])
    module.main()
    starts, *cases = map(json.loads, lines.read_text().splitlines())
    for case in cases:
        assert case["ours_failed"] == case["ours_different"] == 0 < case["ours_compared"]
    return [starts, *cases]


@pytest.mark.thorough
def test_servers_are_driven_and_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(imported("peers", BENCHMARKS), "blas", dict)
    names = "agents,retries,kill,memory"
    lines = compared(names, str(demo.model_path()), monkeypatch, tmp_path)
    _, agents, _, kill, _ = lines
    assert agents["ours_again"] < agents["ours_distinct"] / 8
    assert kill["ours_again"] < 256
    shown = [{**line, "quick": False} for line in lines]
    table = imported("benchmarks.figures", ROOT).Figures({"machine": shown}).peers()
    assert table.count("| stock |") == len(lines)


@pytest.mark.thorough
def test_a_trained_model_replies_as_on_mlx_lm_in_batches_and_after_a_restart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, peers = imported("smollm2", BENCHMARKS).MODEL, imported("peers", BENCHMARKS)
    installed = [model / "config.json", peers.CACHE / peers.BLAS / "complete"]
    if not all(path.exists() for path in installed):
        pytest.skip("needs the model and the BLAS that benchmarks/bench_peers.py installs")
    compared("agents,joins,term", str(model), monkeypatch, tmp_path)
