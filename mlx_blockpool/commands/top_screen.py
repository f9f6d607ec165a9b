"""The screen of `mlx-blockpool top`: a server's facts as tables and bars for a terminal of any size. Knows no HTTP."""

from __future__ import annotations

import io
import time
from typing import Any

from rich.console import Console, ConsoleDimensions, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..config import KVBits
from ..formatting import Report, human_bytes, plain

# States of blocks, in the order of a bar, and what draws them.
STATES = {"held": ("red", "held"), "pinned": ("magenta", "pinned"), "evictable": ("yellow", "cached"), "free": ("green", "free")}
FULL, EMPTY = "\u2588", "\u2591"
WIDTH = 100
LABEL = 10
WHY = "why not more"
WORDS = ("agent", "model", "state", "pin", WHY)
# Lines above the tables, and those that a table takes beside its rows.
HEAD, TABLE = 8, 2


def text(facts: Report, url: str, width: int = WIDTH) -> str:
    """Everything, without colours."""
    out = io.StringIO()
    console = Console(file=out, width=width, no_color=True, highlight=False, legacy_windows=False)
    console.print(screen(facts, url, ConsoleDimensions(width, 10_000), ""))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def screen(facts: Report, url: str, size: ConsoleDimensions, problem: str) -> RenderableType:
    """What fits into a terminal of `size`. `problem`: why the facts are not those of this moment."""
    facts = plain_facts(facts)
    alarms = _alarms(facts, plain(problem))
    groups = facts["cache"].get("groups") or []
    left = size.height - HEAD - len(alarms) - len(groups)
    running, agents, last = _requests(facts), _agents(facts), _last(facts)
    # Requests that run come first, and the others share what is left.
    rows = _shares(left, [len(running), len(agents), len(last)])
    parts: list[RenderableType] = [_title(facts, url), *alarms, "", *_budgets(facts, size.width)]
    parts += [_blocks(group, size.width) for group in groups]
    titles = (
        ("requests", ["agent", "model", "state", "prompt"], running),
        ("agents", ["tokens", "in memory", "own", "shared", "on disk", "reused", "runs", "pin"], agents),
        ("last requests", ["reused", WHY], last),
    )
    for (title, columns, found), most in zip(titles, rows, strict=True):
        if most > 0:
            parts += ["", _table(title, columns, found, most)]
    return Group(*parts)


def plain_facts(fact: Any) -> Any:
    """A fact in which no name or text can change how a terminal works."""
    if isinstance(fact, dict):
        return {plain_facts(name): plain_facts(value) for name, value in fact.items()}
    if isinstance(fact, list):
        return [plain_facts(value) for value in fact]
    return plain(" ".join(fact.split())) if isinstance(fact, str) else fact


def summary(facts: Report) -> str:
    """One line."""
    cache, agents = facts["cache"], (facts["agents"] or {}).get("agents", [])
    used, limit = human_bytes(cache.get("array_bytes") or 0), human_bytes(cache.get("pool_bytes") or 0)
    return f"{len(agents)} agents, {used} of {limit} in use, {_ratio(*_reuse(facts))} of prompts reused in the last hour"


def _shares(left: int, wanted: list[int]) -> list[int]:
    """How many rows each table gets of `left` lines; 0: it is left out."""
    shares = []
    for i, rows in enumerate(wanted):
        others = sum(1 for later in wanted[i + 1 :] if later)
        fair = max(left // (others + 1), 0)
        most = min(rows, max(fair - TABLE, 0))
        shares.append(most)
        left -= most + TABLE if most else 0
    return shares


# -- the head ----------------------------------------------------------------------------------------------------------


def _title(facts: Report, url: str) -> Text:
    names = [model["id"] for model in (facts["models"] or {}).get("models", []) if model["state"] == "loaded"]
    health = facts["health"] or {}
    words = Text("mlx-blockpool", style="bold")
    words.append(f"  {', '.join(names) or 'no model loaded'}  {url}  ", style="default")
    words.append(str(health.get("status", "unknown")), style="green" if health.get("status") == "ok" else "bold red")
    return words.append(f", {health.get('doing', '')}", style="dim")


def _alarms(facts: Report, problem: str) -> list[Text]:
    """What a person should do something about, in plain words."""
    store = facts["cache"].get("store") or {}
    found = [problem, facts["cache"].get("alarm"), store.get("problem") and f"The store is not written: {store['problem']}"]
    found += [f"{model['id']}: {model['failure']}" for model in (facts["models"] or {}).get("models", []) if model["failure"]]
    change = (facts["models"] or {}).get("change")
    lines = [Text(f"! {alarm}", style="bold red", no_wrap=True, overflow="ellipsis") for alarm in found if alarm]
    if change is not None:
        planned = f"changing models: {change['stage']}, {change.get('unload') or 'nothing'} -> {change.get('load') or 'nothing'}"
        lines.append(Text(planned, style="cyan"))
    return lines


def _budgets(facts: Report, width: int) -> list[RenderableType]:
    cache, store = facts["cache"], facts["cache"].get("store") or {}
    lines = [_bar("memory", cache.get("array_bytes") or 0, cache.get("pool_bytes") or 0, width, _bits(cache.get("kv_bits")))]
    if store:
        lines.append(_bar("disk", store.get("bytes") or 0, store.get("store_bytes") or 0, width))
    cached, prompt = _reuse(facts)
    last = next((minute for minute in reversed(_minutes(facts)) if minute["ttft"]), None)
    words = f"{'last hour':<{LABEL}}{_ratio(cached, prompt)} of {prompt:,} prompt tokens reused"
    if last is not None:
        ttft = last["ttft"]
        words += f"; first token after {ttft['median']:.2f} s, {ttft['p95']:.2f} s at the 95th percentile"
    engine = cache.get("engine") or {}
    counts = {"decode_steps": "steps", "tokens": "tokens", "swapped_out": "preempted"}
    if engine.get("jumps"):
        counts |= {"forced_tokens": "forced by forms", "jumps": "jumps"}
    steps = ", ".join(f"{engine.get(name, 0):,} {word}" for name, word in counts.items())
    drafts = cache.get("drafts") or {}
    if drafts.get("drafted"):
        steps += f", {_ratio(drafts['accepted'], drafts['drafted'])} of {drafts['drafted']:,} drafted tokens accepted"
    return [*lines, *(Text(line, no_wrap=True, overflow="ellipsis") for line in (words, f"{'engine':<{LABEL}}{steps}"))]


def _bits(found: Report | None) -> str:
    return "" if found is None else f", {KVBits(**found)}"


def _bar(name: str, used: int, limit: int, width: int, note: str = "") -> Text:
    room = _room(width)
    cells = min(-(-room * used // max(limit, 1)), room)
    colour = "red" if used > 0.95 * limit else "cyan"
    figures = f"{human_bytes(used)} of {human_bytes(limit)}{note}"
    return _line(name, [(colour, FULL * cells), ("green", EMPTY * (room - cells))], figures)


def _blocks(group: Report, width: int) -> Text:
    """The blocks of one layer group by their states, as one bar."""
    total, left = max(group["total"], 1), _room(width)
    parts = []
    for state, (colour, _) in STATES.items():
        # A state with any block at all is seen.
        cells = left if state == "free" else min(-(-_room(width) * group[state] // total), left)
        parts.append((colour, (EMPTY if state == "free" else FULL) * cells))
        left -= cells
    counts = ", ".join(f"{group[state]:,} {word}" for state, (_, word) in STATES.items() if group[state])
    return _line("blocks", parts, f"{counts}: {group['group']}")


def _room(width: int) -> int:
    """Characters of a bar."""
    return max(width - 60, 10)


def _line(name: str, parts: list[tuple[str, str]], figures: str) -> Text:
    line = Text(f"{name:<{LABEL}}", no_wrap=True, overflow="ellipsis")
    for colour, cells in parts:
        line.append(cells, style=colour)
    return line.append(f"  {figures}")


def _minutes(facts: Report) -> list[Any]:
    return list((facts["hour"] or {}).get("minutes", []))


def _reuse(facts: Report) -> tuple[int, int]:
    """Cached tokens and all tokens of the last hour's prompts; of all prompts where the server has no hours."""
    minutes = _minutes(facts)
    figures = minutes or [facts["cache"]]
    return sum(each.get("cached_tokens") or 0 for each in figures), sum(each.get("prompt_tokens") or 0 for each in figures)


def _ratio(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "-"


# -- the tables --------------------------------------------------------------------------------------------------------


def _requests(facts: Report) -> list[list[str]]:
    now = time.time()
    rows = []
    for request in facts["requests"]:
        prompt = f"{request['done']:,} of {request['total']:,}"
        state = f"{request['state']}, {max(now - request['since'], 0):.0f} s"
        rows.append([request["id"], request["agent"] or "-", request["model"] or "-", state, prompt])
    return rows


def _agents(facts: Report) -> list[list[str]]:
    """The busy ones first, then those used last."""
    hours = (facts["hour"] or {}).get("agents", {})
    agents = (facts["agents"] or {}).get("agents", [])
    by_use = sorted(agents, key=lambda agent: agent["used"], reverse=True)
    rows = []
    for agent in sorted(by_use, key=lambda agent: not (agent["running"] or agent["waiting"])):
        hour = hours.get(agent["name"], {})
        rows.append(
            [
                agent["shown"],
                f"{agent['tokens']:,}",
                f"{agent['tokens_in_memory']:,}",
                human_bytes(agent["memory"]["own_bytes"]),
                human_bytes(agent["memory"]["shared_bytes"]),
                f"{agent['tokens_on_disk']:,}",
                _ratio(hour.get("cached_tokens", 0), hour.get("prompt_tokens", 0)),
                f"{agent['running']}+{agent['waiting']}" if agent["running"] or agent["waiting"] else "",
                "pin" if agent["pinned"] or agent["pinned_in_memory"] else "",
            ]
        )
    return rows


def _last(facts: Report) -> list[list[str]]:
    rows = []
    for request in (facts["last"] or {}).get("requests", []):
        prompt, cached = request.get("prompt_tokens") or 0, request.get("cached_tokens") or 0
        why = str(request.get("why") or request.get("error") or request.get("state") or "")
        rows.append([f"{request['time'][11:19]} {request.get('agent') or '-'}", _ratio(cached, prompt), why])
    return rows


def _table(title: str, columns: list[str], rows: list[list[str]], most: int) -> Table:
    more = f" ({most} of {len(rows)})" if most < len(rows) else ""
    # The last column of words takes what the others leave.
    table = Table(box=None, pad_edge=False, header_style="dim", expand=columns[-1] == WHY)
    table.add_column(f"{title}{more}", no_wrap=True, overflow="ellipsis", min_width=20, max_width=34, header_style="bold")
    for column in columns:
        justify: Any = "left" if column in WORDS else "right"
        ratio = 1 if column == WHY else None
        table.add_column(column, justify=justify, no_wrap=True, overflow="ellipsis", min_width=len(column), ratio=ratio)
    for row in rows[:most]:
        table.add_row(*map(Text, row))
    return table
