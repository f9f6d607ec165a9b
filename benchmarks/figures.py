"""The tables and sentences with figures in the READMEs, from the lines in results/.

A test compares both.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .plots import Line, latest, session_table

ROOT = Path(__file__).parent.parent
# The machine of the figures. What it has not measured is taken from another one, and says so.
MACHINE = "cpu-xeon-2core"
# The READMEs with figures, the project's own first.
DOCUMENTS = (
    "README.md",
    "benchmarks/README.md",
    "mlx_blockpool/server/quantised.md",
    "benchmarks/peers.md",
)


@dataclass(frozen=True)
class Row:
    """A row of the table: cells as templates over the line of a case, or over several lines, whose
    values stand side by side.

    A template may use the line's figures, and `times_X` for the quotient of `stock_X` and `ours_X`.
    `first`: whether the project's README has the row too.
    """

    what: str
    bench: str
    cases: tuple[str, ...]
    ours: str = ""
    stock: str = ""
    ratio: str = ""
    first: bool = False


SERVER = ("server", ("5 agents, 3 turns, one system prompt",))
SESSIONS = ("sessions_http", ("100 % of the working set",))
REPLACED = tuple(
    f"a last message that is replaced in each turn, {name}"
    for name in ("llama", "lfm2", "gemma3_text", "gpt_oss")
)
LATENTS = (
    "batch",
    tuple(
        f"{name}, mixed lengths"
        for name in ("deepseek_v3", "kimi_linear", "gemma3n", "gemma4_text")
    ),
)
AIPERF = ("aiperf", ("5 conversations of 4 turns with 300 tokens each",))
CONTEXTS = (256, 1024, 4096, 16384)
PREFILLS = tuple(
    f"prefill of {context}, hidden {256 if context <= 4096 else 64}" for context in CONTEXTS
)
RATIO = "{ratio:.1f}x"
KERNEL_RATIO = "{ratio_stock:.1f}x ({ratio_ragged:.1f}x of a call for each member)"

ROWS = (
    Row(
        "five agents, three turns each, one system prompt of 1.5k tokens, over HTTP: wall time",
        *SERVER,
        "{ours_wall_s:.1f} s",
        "{stock_wall_s:.1f} s",
        "{times_wall_s:.1f}x",
        first=True,
    ),
    Row(
        "the same: time to first token, 95th percentile",
        *SERVER,
        "{ours_ttft_p95_s:.1f} s",
        "{stock_ttft_p95_s:.1f} s",
        "{times_ttft_p95_s:.1f}x",
    ),
    Row(
        "the same: resident memory of the process",
        *SERVER,
        "{ours_resident_mb:.0f} MB",
        "{stock_resident_mb:.0f} MB",
        first=True,
    ),
    Row(
        "four recorded coding sessions at a time, over HTTP: time to first token, median",
        *SESSIONS,
        "{ours_ttft_ms:.0f} ms",
        "{stock_ttft_ms:.0f} ms",
        "{times_ttft_ms:.1f}x",
    ),
    Row(
        "the same: 95th percentile",
        *SESSIONS,
        "{ours_ttft_p95_ms:.0f} ms",
        "{stock_ttft_p95_ms:.0f} ms",
        "{times_ttft_p95_ms:.1f}x",
    ),
    Row(
        "the same: known tokens that were reused",
        *SESSIONS,
        "{ours_reuse:.3f}",
        "{stock_reuse:.3f}",
    ),
    Row(
        "the same: wall time",
        *SESSIONS,
        "{ours_wall_s:.0f} s",
        "{stock_wall_s:.0f} s",
        "{times_wall_s:.2f}x",
    ),
    Row(
        "six turns of 2,500 tokens, each with a system message that the next replaces, llama / "
        "lfm2 / gemma3_text / gpt_oss: known tokens that were reused",
        "sessions_http",
        REPLACED,
        "{ours_reuse:.3f}",
        "{stock_reuse:.3f}",
    ),
    Row(
        "the same: tokens computed",
        "sessions_http",
        REPLACED,
        "{ours_computed:,}",
        "{stock_computed:,}",
    ),
    Row(
        "aiperf, five conversations of four turns: time to first token, median",
        *AIPERF,
        "{ours_ttft_ms:.0f} ms",
        "{stock_ttft_ms:.0f} ms",
        "{times_ttft_ms:.1f}x",
    ),
    Row(
        "the same: 95th percentile",
        *AIPERF,
        "{ours_ttft_p95_ms:.0f} ms",
        "{stock_ttft_p95_ms:.0f} ms",
        "{times_ttft_p95_ms:.1f}x",
    ),
    Row(
        "decode at 256 / 1k / 4k / 16k tokens, tokens per second",
        "cache",
        tuple(f"decode at {n}" for n in CONTEXTS),
        ratio="{ratio_tokens_per_second:.2f}",
    ),
    Row(
        "prefill of 256 / 1k / 4k / 16k tokens, tokens per second",
        "cache",
        PREFILLS,
        ratio="{ratio_tokens_per_second:.2f}",
    ),
    Row(
        "a decode step of 8 sequences with contexts 300 to 4,000 (6 layers)",
        "batch",
        ("mixed lengths",),
        "{ours_step_ms:.1f} ms",
        "{stock_step_ms:.1f} ms",
        "{ratio_step:.1f}x ({ratio_one_stream:.1f}x on one core)",
        first=True,
    ),
    Row(
        "the same with equal contexts of 2,000",
        "batch",
        ("equal lengths",),
        "{ours_step_ms:.1f} ms",
        "{stock_step_ms:.1f} ms",
        "{ratio_step:.1f}x ({ratio_one_stream:.1f}x on one core)",
    ),
    Row(
        "the same with one sequence of 4,000",
        "batch",
        ("a batch of one",),
        "{ours_step_ms:.1f} ms",
        "{stock_step_ms:.1f} ms",
        "{ratio_step:.1f}x ({ratio_one_stream:.1f}x on one core)",
    ),
    Row(
        "one sequence joining and leaving the batch of 8",
        "batch",
        ("mixed lengths",),
        "{ours_stall_ms:.2f} ms",
        "{stock_stall_ms:.0f} ms",
        "{ratio_stall:,.0f}x",
    ),
    Row(
        "a step of 8 with contexts 300 to 4,000, tiny deepseek_v3 / kimi_linear / gemma3n / "
        "gemma4_text (processor time)",
        *LATENTS,
        "{ours_cpu_ms:.1f} ms",
        "{stock_cpu_ms:.1f} ms",
        "{ratio_cpu:.2f}x",
    ),
    Row(
        "the same: caches of five agents on one prefix of 4,096 tokens, 8,192 of the last two",
        *LATENTS,
        "{ours_agents_mb:.1f} MB",
        "{stock_agents_mb:.1f} MB",
        "{ratio_agents:.1f}x",
    ),
    Row(
        "attention of 8 sequences on one prefix of 4,096 tokens, float32 / float16",
        "shared",
        ("attention, float32", "attention, float16"),
        "{auto_ms:.0f} ms",
        "{stock_ms:.0f} ms",
        RATIO,
    ),
    Row(
        "the decode path that is chosen, against the fastest of three, for 30 kinds of batches: "
        "worst / median (processor time)",
        "paths",
        ("30 kinds of batches",),
        ratio="{worst_share:.3f} / {median_share:.3f}",
    ),
    Row(
        "attention of one layer by the kernel, bfloat16, 8 sequences of 4,096 / 300 to 4,000 "
        "tokens; part of the bandwidth",
        "kernel",
        tuple(f"attention, 8 of {tokens} tokens" for tokens in ("4,096", "300 to 4,000")),
        "{kernel_ms:.3f} ms ({kernel_share:.0%})",
        "{stock_ms:.3f} ms",
        KERNEL_RATIO,
    ),
    Row(
        "the same: a step of a model with 8 layers",
        "kernel",
        tuple(f"step, 8 of {tokens} tokens" for tokens in ("4,096", "300 to 4,000")),
        "{kernel_ms:.2f} ms",
        "{stock_ms:.2f} ms",
        KERNEL_RATIO,
    ),
    Row(
        "keys and values in 8 bits, and mlx-lm's quantised caches: decode of one sequence at 4k, "
        "float32 / bfloat16 "
        "(processor time)",
        "quantised",
        ("decode at 4096, float32", "decode at 4096, bfloat16"),
        "{ours_cpu_ms:.1f} ms",
        "{stock_cpu_ms:.1f} ms",
        "{ratio_stock_cpu:.2f}x",
    ),
    Row(
        "the same: a step of 8 sequences with contexts 300 to 4,000, which mlx-lm runs one after "
        "another",
        "quantised",
        ("a batch of 8 of mixed lengths, float32", "a batch of 8 of mixed lengths, bfloat16"),
        "{ours_cpu_ms:.1f} ms",
        "{stock_cpu_ms:.1f} ms",
        "{ratio_stock_cpu:.2f}x",
    ),
    Row(
        "the same: prefill of 8k / 16k tokens, float32, with the peak of memory",
        "quantised",
        ("prefill of 8192, float32", "prefill of 16384, float32"),
        "{ours_peak_mb:.0f} MB",
        "{stock_peak_mb:.0f} MB",
        "{ratio_stock_cpu:.2f}x",
    ),
    Row(
        "replies that edit a file, bfloat16, one / four at a time: decode with drafts, and what "
        "the cost curve allows",
        "drafts",
        ("edits, bfloat16, one at a time", "edits, bfloat16, batches of 4"),
        ratio="{speed:.2f}x of {bound:.2f}x",
    ),
    Row(
        "the same: text of which the prompt has nothing",
        "drafts",
        ("fresh text, bfloat16, one at a time", "fresh text, bfloat16, batches of 4"),
        ratio="{ratio:.3f}x",
    ),
    Row(
        "a request of 200 tokens during a prefill of 8k: speed of its decode",
        "engine",
        ("200 tokens during a prefill of 8192",),
        "{speed_kept:.2f} of alone",
    ),
    Row(
        "first token of 8k known tokens after a restart, against prefilling them",
        "store",
        ("first token of 8192 after a restart",),
        "{warm_s:.2f} s",
        "{cold_s:.1f} s",
        "{ratio:.0f}x",
        first=True,
    ),
    Row(
        "99th percentile of decode steps with the store on, against off",
        "store",
        ("decode steps of 8 with the store on and off",),
        "{on_p99_ms:.1f} ms",
        "{off_p99_ms:.1f} ms",
        "{ratio_p99:.2f}x",
    ),
    Row(
        "a decode step of 8 streams while the page, Prometheus and a reader of events watch, "
        "against unwatched",
        "watching",
        ("events, metrics and the page",),
        "{step_watched_ms:.1f} ms",
        "{step_unwatched_ms:.1f} ms",
        "{step_ratio:.2f}x",
    ),
    Row(
        "masks of forms at 128k tokens, 1 / 8 rows, against the logprobs of the same step "
        "(processor time)",
        "forms",
        ("the mask of 1 row", "the mask of 8 rows"),
        "{mask_us:.0f} us",
        ratio="{share_of_logprobs:.2f} of {logprobs_us:.0f} us",
    ),
    Row(
        "a decode step of 8 at 128k tokens, all in a form, against none in one (processor time)",
        "forms",
        ("steps of eight, of which none, one and all have a form",),
        "{eight_ms:.0f} ms",
        "{none_ms:.0f} ms",
        "{ratio_eight:.2f}x",
    ),
    Row(
        "steps of a tool call with long names, against its tokens",
        "forms",
        ("a call of qwen3_coder with long names",),
        "{steps} for {tokens}",
    ),
    Row(
        "5 agents of 2k to 8k tokens: memory wasted by blocks, by padding",
        "engine",
        ("5 agents of 2000 to 8000 tokens",),
        "{waste:.1%}",
        "{padded_waste:.0%}",
    ),
    Row(
        "a fetch of 8k known tokens in a script: processor time with an attached pool, and with "
        "`attach=False`",
        "prefix",
        ("fetch of 8192 known tokens in a script, attached and not",),
        "{attached_cpu_ms:.2f} ms",
        "{not_attached_cpu_ms:.0f} ms",
        "{ratio:.0f}x",
    ),
    Row(
        "looking up 100k known tokens among 1,000 conversations",
        "prefix",
        ("lookup: 100000 tokens and a turn of 50, among 1000",),
        "{ours_ms:.2f} ms",
        "{stock_ms:.1f} ms",
        "{ratio:.0f}x",
    ),
    Row(
        "the same where the prompt leaves the known path at token 4,000",
        "prefix",
        ("lookup: 100000 tokens, 4000 known, among 1000",),
        "{ours_ms:.2f} ms",
        "{stock_ms:.0f} ms",
        "{ratio:.0f}x",
    ),
    Row(
        "acquiring prompts of 80k to 120k tokens of recorded sessions: a full layer / with a "
        "window / with a state",
        "sessions",
        tuple(f"{kind}: 100 % of the working set" for kind in ("full", "window", "hybrid")),
        "{fetch_ms:.1f} ms",
    ),
    Row(
        "blocks of 8k tokens in all layer groups (Gemma 3 12B's spec)",
        "pool",
        ("gemma3 12B: blocks of 8k tokens, all groups",),
        "{allocate_us:.0f} us",
    ),
)

AGENTS = """
- *Ten agents* of every protocol ran for ten minutes against one server that was killed {kills} times (`bench_agents`, on an
{device}): {requests:,} requests, of which {hang_ups} were hung up on, {failed} failures, and {held} blocks held at the end. The
model repeats only what it has read; replies with another agent's letters: {secrets_crossed}. Of {replies_compared} replies that
were compared with mlx-lm's, {replies_different} differed. {cached_share_after_kill:.0%} of the tokens known before a kill were
read again after it, and resident memory was {resident_mb_second_third} and {resident_mb_last_third} MB in the last two thirds
of the run."""  # noqa: E501
REPLAYED = (
    "{ideal:.0%} of the prompt tokens were in an earlier request. A pool of 100 % has {blocks:,} "
    "blocks, the most that are needed"
    " again at any time."
)
REFUSED = "At 25 % {full} prompts are longer than the pool and are rejected, {hybrid} for `hybrid`."

# The columns of the table of routers.
ROUTED = (
    ("reused", "{reused:.3f}"),
    ("tokens computed", "{computed_tokens:,}"),
    ("first token, mean", "{ttft_mean_s:.0f} s"),
    ("95th percentile", "{ttft_p95_s:.0f} s"),
    ("busiest machine", "{busiest:.2f}"),
)
# The columns of the table of peers; the prefix of a server's figures is added.
COMPARED = {
    "wall time (all rounds)": "{wall_s:.1f} s ({wall_least_s:.1f} to {wall_most_s:.1f})",
    "first token": "{first_s:.2f} s",
    "longest gap": "{gap_s:.2f} s",
    "computed again": "{again:,.0f}",
    "reused": "{reused:,.0f}",
    "peak memory": "{peak_mb:,.0f} MB",
    "its own cost": "{own_s:.1f} s",
    "wall time to it": "{ratio:.2f}",
    "other replies": "{different} of {compared}",
    "failed": "{failed:.0f}",
}
ANSWERS = (
    "`bench_answers` compares two small models with themselves: the demo model's answers to "
    "{questions} questions that it was not"
    " trained on, and the calls of one that has to copy random numbers from earlier results, in "
    "{sessions} sessions of {turns}"
    " turns. Divergence is KL(as computed || quantised) where the model writes, in nats: mean / "
    "99th percentile / largest."
)
FORMS = {
    "off": "as computed",
    "8": "8 bits",
    "keys 8, values 4": "keys 8, values 4",
    "keys 4, values 8": "keys 4, values 8",
    "4": "4 bits",
}


class Figures:
    """The last line of each case: the machine's own, or else that of another machine."""

    def __init__(self, machines: dict[str, list[Line]]) -> None:
        self._lines: dict[tuple[str, str], tuple[str, Line]] = {}
        for machine in sorted(machines, key=lambda name: name == MACHINE):
            for line in latest(line for line in machines[machine] if not line.get("quick")):
                self._lines[line["bench"], line["case"]] = machine, line

    def row(self, row: Row) -> list[str]:
        found = [
            self._lines[row.bench, case] for case in row.cases if (row.bench, case) in self._lines
        ]
        if len(found) < len(row.cases):
            return []
        lines = [_with_quotients(line) for _, line in found]
        elsewhere = {line["device"] for machine, line in found if machine != MACHINE}
        what = row.what + "".join(f" ({device})" for device in elsewhere)
        cells = (row.ours, row.stock, row.ratio)
        return [
            what,
            *(" / ".join(cell.format(**line) for line in lines) if cell else "" for cell in cells),
        ]

    def table(self, first: bool = False) -> str:
        rows = [self.row(row) for row in ROWS if row.first or not first]
        return _table(["what", "here", "stock mlx-lm", "ratio"], [row for row in rows if row])

    def agents(self) -> str:
        _, line = self._lines["agents", "10 agents, 600 s, 3 kills"]
        return _wrapped(AGENTS.format(**line, failed=len(line["failures"])), indent="  ")

    def sessions(self) -> str:
        lines = {
            case: line for (bench, case), (_, line) in self._lines.items() if bench == "sessions"
        }
        refused = {
            kind: lines[f"{kind}: 25 % of the working set"]["refused"]
            for kind in ("full", "hybrid")
        }
        words = (
            REPLAYED.format(**lines["full: 100 % of the working set"])
            + " "
            + REFUSED.format(**refused)
        )
        head = [
            "model",
            "pool",
            "offline optimum",
            "with the disk",
            "mlx-blockpool",
            "plain LRU over blocks",
            "`LRUPromptCache`",
        ]
        return _wrapped(words) + "\n\n" + _table(head, session_table(lines.values()))

    def answers(self) -> str:
        rows = []
        for form, name in FORMS.items():
            asked, called = (
                self._lines["answers", f"{what}, {form}"][1] for what in ("questions", "tool calls")
            )
            divergences = [
                ""
                if form == "off"
                else "{kl_mean:.1e} / {kl_p99:.1e} / {kl_most:.1e}".format(**line)
                for line in (asked, called)
            ]
            first = "" if called["first_wrong_turn"] is None else f"{called['first_wrong_turn']:g}"
            calls = [f"{called['right']:.1%}", str(called["faultless"]), first]
            rows.append([name, str(asked["right"]), divergences[0], *calls, divergences[1]])
        head = [
            "keys and values",
            "answers right",
            "divergence",
            "calls right",
            "faultless sessions",
            "first wrong turn",
            "divergence",
        ]
        return _wrapped(ANSWERS.format(**{**asked, **called})) + "\n\n" + _table(head, rows)

    def peers(self) -> str:
        lines = {case: line for (bench, case), (_, line) in self._lines.items() if bench == "peers"}
        if not lines:
            return ""
        starts = lines.pop("starts")
        names = [name.removesuffix("_version") for name in starts if name.endswith("_version")]
        servers = []
        for name in names:
            own = _own(starts, name)
            start = "{start_s:.1f} s", "{token_ms:.1f} ms", "{step_ms:.0f} ms", "`{settings}`"
            servers.append([own["name"], own["version"], *(cell.format(**own) for cell in start)])
        head = ["server", "version", "start", "prompt token", "reply token", "settings"]
        rows = [
            [case if name == names[0] else "", _own(starts, name)["name"], *_compared(line, name)]
            for case, line in lines.items()
            for name in names
        ]
        rounds = next(iter(lines.values()))["repeat"]
        where = "Rounds: {rounds}. {device}, mlx {mlx}, mlx-lm {mlx_lm}; load average {load}."
        tables = _table(head, servers), _table(["workload", "server", *COMPARED], rows)
        return "\n\n".join([where.format(**starts, rounds=rounds), *tables])

    def routers(self) -> str:
        lines = [line for (bench, _), (_, line) in self._lines.items() if bench == "routers"]
        return _table(
            ["machines", "router", *(head for head, _ in ROUTED)], [_routed(line) for line in lines]
        )

    def written(self, text: str, first: bool = False) -> str:
        """A README with the parts between its marks made anew."""
        parts = {
            "figures": lambda: self.table(first),
            "agents": self.agents,
            "sessions": self.sessions,
            "routers": self.routers,
            "peers": self.peers,
            "answers": self.answers,
        }
        for name, part in parts.items():
            if f"<!-- {name} -->" in text:
                marked = re.compile(rf"(<!-- {name} -->\n).*?(\n<!-- end of {name} -->)", re.DOTALL)
                text = marked.sub(
                    lambda found, part=part: f"{found[1]}\n{part()}\n{found[2]}", text
                )  # type: ignore[misc]
        return text


def write(machines: dict[str, list[Line]]) -> None:
    """Bring the READMEs up to date."""
    figures = Figures(machines)
    for name in DOCUMENTS:
        path = ROOT / name
        path.write_text(
            figures.written(path.read_text(encoding="utf-8"), name == DOCUMENTS[0]),
            encoding="utf-8",
        )


def _with_quotients(line: Line) -> dict[str, Any]:
    pairs = [
        (name[5:], line.get("stock_" + name[5:]), ours)
        for name, ours in line.items()
        if name.startswith("ours_")
    ]
    return {
        **line,
        **{
            f"times_{name}": stock / ours
            for name, stock, ours in pairs
            if isinstance(stock, (int, float)) and ours
        },
    }


def _own(line: Line, server: str) -> dict[str, Any]:
    """A server's figures."""
    prefix = f"{server}_"
    return {name.removeprefix(prefix): line[name] for name in line if name.startswith(prefix)}


def _compared(line: Line, server: str) -> list[str]:
    """Cells of a server; "-" for a figure that it does not have."""
    own = {name: value for name, value in _own(line, server).items() if value is not None}
    return [
        cell.format(**own) if own.keys() >= set(re.findall(r"{(\w+)", cell)) else "-"
        for cell in COMPARED.values()
    ]


def _routed(line: Line) -> list[str]:
    number, _, router = line["case"].partition(" machines, ")
    return [number, "" if number == "1" else router, *(cell.format(**line) for _, cell in ROUTED)]


def _table(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [
        "|" + "|".join(f" {cell} " if cell else " " for cell in row) + "|" for row in [head, *rows]
    ]
    return _spaced("\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]]))


def _wrapped(text: str, indent: str = "") -> str:
    whole = _spaced(text.strip()).replace(" %", "\N{NO-BREAK SPACE}%")
    lines = textwrap.fill(
        whole, 138, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return lines.replace("\N{NO-BREAK SPACE}", " ")


def _spaced(text: str) -> str:
    """A space between a number and its percent sign."""
    return re.sub(r"(?<=\d)%", " %", text)
