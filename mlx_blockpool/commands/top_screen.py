"""The screen of `mlx-blockpool top`: a server's facts as tables and bars for a terminal of any
size. Does no HTTP.
"""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..config import KVBits
from ..formatting import Report, human_bytes, plain

# States of blocks, in the order of a bar, with their colours and words.
STATES = {
    "held": ("red", "held"),
    "pinned": ("magenta", "pinned"),
    "evictable": ("yellow", "cached"),
    "free": ("green", "free"),
}
FULL, EMPTY = "\u2588", "\u2591"
WIDTH = 160
LABEL = 10
WHY = "why not more"
# The columns of the tables; those of words are aligned to the left.
COLUMNS = {
    "requests": ["model", "state", "prompt", "reply"],
    "agents": ["tokens", "in memory", "own", "shared", "on disk", "reused", "runs", "pin"],
    "last requests": ["reused", WHY],
}
WORDS = ("model", "state", "pin", WHY)
# Lines of a table apart from its rows.
TABLE_LINES = 2
# For text that is not shown in a terminal.
UNLIMITED_LINES = 100_000


def text(facts: Report, url: str, width: int = WIDTH) -> str:
    """Everything, without colours."""
    out = io.StringIO()
    console = Console(file=out, width=width, no_color=True, highlight=False, legacy_windows=False)
    console.print(screen(facts, url, width, UNLIMITED_LINES, ""))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def screen(facts: Report, url: str, width: int, height: int, problem: str) -> Group:
    """What fits into a terminal of this size. `problem`: why the facts are out of date."""
    facts = {name: plain_facts(fact) or {} for name, fact in facts.items()}
    parts: list[RenderableType] = [
        _title(facts, url),
        *_alarms(facts, plain(problem)),
        "",
        *_figures(facts, width),
    ]
    tables = {"requests": _requests(facts), "agents": _agents(facts), "last requests": _last(facts)}
    tables = {title: rows for title, rows in tables.items() if rows}
    # Two lines stay empty. A table leaves the lines that it does not need to those after it.
    lines = height - len(parts) - 2
    for number, (title, rows) in enumerate(tables.items()):
        most = min(len(rows), lines // (len(tables) - number) - TABLE_LINES)
        if most > 0:
            parts += ["", _table(title, rows, most)]
            lines -= most + TABLE_LINES
    return Group(*parts)


def plain_facts(fact: Any) -> Any:
    """A fact whose names and texts contain no control characters for the terminal."""
    if isinstance(fact, dict):
        return {plain_facts(name): plain_facts(value) for name, value in fact.items()}
    if isinstance(fact, list):
        return [plain_facts(value) for value in fact]
    return plain(" ".join(fact.split())) if isinstance(fact, str) else fact


def summary(facts: Report) -> str:
    """One line."""
    facts = {name: fact or {} for name, fact in facts.items()}
    used, limit = (
        human_bytes(facts["cache"].get(name) or 0) for name in ("used_bytes", "pool_bytes")
    )
    agents = len(facts["agents"].get("agents", []))
    return (
        f"{agents} agents, {used} of {limit} in use, {_percent(*_reuse(facts))} of prompts reused "
        "in the last hour"
    )


# -- the lines above the tables --------------------------------------------------------------------


def _title(facts: Report, url: str) -> Text:
    names = [
        model["id"] for model in facts["models"].get("models", []) if model["state"] == "loaded"
    ]
    status = str(facts["health"].get("status", "unknown"))
    return Text.assemble(
        "mlx-blockpool",
        (f"  {', '.join(names) or 'no model loaded'}  {url}  ", "default"),
        (status, "green" if status == "ok" else "bold red"),
        (f", {doing}" if (doing := facts["health"].get("doing")) else "", "dim"),
        style="bold",
    )


def _alarms(facts: Report, problem: str) -> list[Text]:
    """The problems that need action, in plain words."""
    cache, models = facts["cache"], facts["models"]
    store_problem = (cache.get("store") or {}).get("problem")
    found = [
        problem,
        cache.get("alarm"),
        store_problem and f"The prompt store does not work: {store_problem}",
    ]
    found += [
        f"{model['id']}: {model['failure']}"
        for model in models.get("models", [])
        if model["failure"]
    ]
    lines = [_line(f"! {alarm}", "bold red") for alarm in found if alarm]
    change = models.get("change")
    if change is not None:
        planned = (
            f"changing models: {change['stage']}, {change.get('unload') or 'nothing'} -> "
            f"{change.get('load') or 'nothing'}"
        )
        lines.append(Text(planned, style="cyan"))
    return lines


def _figures(facts: Report, width: int) -> list[Text]:
    """The bars of memory, pool and disk, the last hour, the engine, and a bar for each layer
    group.
    """
    cache, cells = facts["cache"], max(width - 60, 10)
    bits = cache.get("kv_bits")
    note = "" if bits is None else f", {KVBits(**bits)}"
    lines = []
    if machine := cache.get("memory"):
        weights, active = machine["weights_bytes"], machine["active_bytes"]
        figures = f"{human_bytes(active)} of {human_bytes(machine['total_bytes'])}"
        parts = [(weights, "blue"), (max(active - weights, 0), "cyan")]
        words = f"{figures}, {human_bytes(weights)} of weights"
        lines.append(_bar("memory", parts, machine["total_bytes"], cells, words))
    lines.append(
        _budget("pool", cache.get("used_bytes") or 0, cache.get("pool_bytes") or 0, cells, note)
    )
    if store := cache.get("store"):
        lines.append(_budget("disk", store.get("bytes") or 0, store.get("store_bytes") or 0, cells))
    cached, prompt = _reuse(facts)
    hour = f"{'last hour':<{LABEL}}{_percent(cached, prompt)} of {prompt:,} prompt tokens reused"
    times = [minute["ttft"] for minute in facts["hour"].get("minutes", []) if minute["ttft"]]
    if times:
        hour += (
            f"; first token after {times[-1]['median']:.2f} s, {times[-1]['p95']:.2f} s at the "
            "95th percentile"
        )
    if saved := cache.get("seconds_saved"):
        words = f"{saved['since_start']:,.1f} s of prefill since the start"
        since = f"{saved['since_installation']:,.1f} s since installation"
        lines.append(_line(f"{'saved':<{LABEL}}{words}, {since}"))
    engine, drafts = cache.get("engine") or {}, cache.get("drafts") or {}
    counts = {"decode_steps": "steps", "tokens": "tokens", "swapped_out": "preempted"}
    if engine.get("jumps"):
        counts |= {"forced_tokens": "forced by forms", "jumps": "jumps"}
    steps = ", ".join(f"{engine.get(name, 0):,} {word}" for name, word in counts.items())
    if drafts.get("drafted"):
        steps += (
            f", {_percent(drafts['accepted'], drafts['drafted'])} of {drafts['drafted']:,} "
            "drafted tokens accepted"
        )
    lines += [_line(hour), _line(f"{'engine':<{LABEL}}{steps}")]
    return [*lines, *(_blocks(group, cells) for group in cache.get("groups") or [])]


def _budget(name: str, used: int, limit: int, cells: int, note: str = "") -> Text:
    colour = "red" if used > 0.95 * limit else "cyan"
    return _bar(
        name, [(used, colour)], limit, cells, f"{human_bytes(used)} of {human_bytes(limit)}{note}"
    )


def _blocks(group: Report, cells: int) -> Text:
    """The blocks of one layer group by their states, as one bar."""
    counts = ", ".join(
        f"{group[state]:,} {word}" for state, (_, word) in STATES.items() if group[state]
    )
    used = [(group[state], colour) for state, (colour, _) in STATES.items() if state != "free"]
    return _bar("blocks", used, group["total"], cells, f"{counts}: {group['group']}")


def _bar(name: str, used: list[tuple[int, str]], total: int, cells: int, figures: str) -> Text:
    """A bar with a part for each of the `used` counts, at least one cell for any count above 0;
    the rest of `total` is free.
    """
    parts, left = [], cells
    for count, colour in used:
        size = min(-(-cells * count // max(total, 1)), left)
        parts.append((FULL * size, colour))
        left -= size
    label = f"{name:<{LABEL}}"
    return Text.assemble(
        label, *parts, (EMPTY * left, "green"), f"  {figures}", no_wrap=True, overflow="ellipsis"
    )


def _line(words: str, style: str = "") -> Text:
    return Text(words, style=style, no_wrap=True, overflow="ellipsis")


def _reuse(facts: Report) -> tuple[int, int]:
    """Cached tokens and all tokens of the last hour's prompts; of all prompts where the server
    has no hours.
    """
    figures = facts["hour"].get("minutes") or [facts["cache"]]
    return sum(each.get("cached_tokens") or 0 for each in figures), sum(
        each.get("prompt_tokens") or 0 for each in figures
    )


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "-"


# -- the tables ------------------------------------------------------------------------------------


def _requests(facts: Report) -> list[list[str]]:
    rows = []
    for each in facts["requests"]:
        seconds = "" if each["seconds"] is None else f", {each['seconds']:.0f} s"
        prompt = f"{each['done']:,} of {each['prompt']:,}"
        rows.append(
            [
                each["agent"] or "-",
                each["model"],
                f"{each['state']}{seconds}",
                prompt,
                f"{each['generated']:,}",
            ]
        )
    return rows


def _agents(facts: Report) -> list[list[str]]:
    """The busy ones first, then those used last."""
    hours, rows = facts["hour"].get("agents", {}), []
    by_use = sorted(
        facts["agents"].get("agents", []), key=lambda agent: agent["used"], reverse=True
    )
    for agent in sorted(by_use, key=lambda agent: not (agent["running"] or agent["waiting"])):
        hour, memory = hours.get(agent["name"], {}), agent["memory"]
        rows.append(
            [
                agent["shown"],
                f"{agent['tokens']:,}",
                f"{agent['tokens_in_memory']:,}",
                human_bytes(memory["own_bytes"]),
                human_bytes(memory["shared_bytes"]),
                f"{agent['tokens_on_disk']:,}",
                _percent(hour.get("cached_tokens", 0), hour.get("prompt_tokens", 0)),
                f"{agent['running']}+{agent['waiting']}"
                if agent["running"] or agent["waiting"]
                else "",
                "pin" if agent["pinned"] or agent["pinned_in_memory"] else "",
            ]
        )
    return rows


def _last(facts: Report) -> list[list[str]]:
    rows = []
    for each in facts["last"].get("requests", []):
        reused = _percent(each.get("cached_tokens") or 0, each.get("prompt_tokens") or 0)
        why = str(each.get("why") or each.get("error") or each.get("state") or "")
        rows.append([f"{each['time'][11:19]} {each.get('agent') or '-'}", reused, why])
    return rows


def _table(title: str, rows: list[list[str]], most: int) -> Table:
    columns = COLUMNS[title]
    more = f" ({most} of {len(rows)})" if most < len(rows) else ""
    # The last column of words takes what the others leave.
    table = Table(box=None, pad_edge=False, header_style="dim", expand=columns[-1] == WHY)
    table.add_column(
        f"{title}{more}",
        no_wrap=True,
        overflow="ellipsis",
        min_width=20,
        max_width=34,
        header_style="bold",
    )
    for column in columns:
        justify: Any = "left" if column in WORDS else "right"
        ratio = 1 if column == WHY else None
        table.add_column(
            column,
            justify=justify,
            no_wrap=True,
            overflow="ellipsis",
            min_width=len(column),
            ratio=ratio,
        )
    for row in rows[:most]:
        table.add_row(*map(Text, row))
    return table
