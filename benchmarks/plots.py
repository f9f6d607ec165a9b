"""The plots and the table of sessions in the README, from the lines of one machine's results.

Needs the extra `bench`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Line = dict[str, Any]

OURS, STOCK = "mlx-blockpool", "mlx-lm"
COLORS = {OURS: "#2563eb", STOCK: "#9ca3af"}
# What the lines of bench_sessions call each curve.
CURVES = {
    "optimum": ("offline optimum", "#111827", "--"),
    "ours_disk": ("mlx-blockpool, with the disk", "#16a34a", "o-"),
    "ours": (OURS, COLORS[OURS], "o-"),
    "plain_lru": ("plain LRU over blocks", "#f59e0b", ":"),
    "stock": ("LRUPromptCache", COLORS[STOCK], "s-"),
}


def latest(lines: Iterable[Line]) -> list[Line]:
    """The last line of each case; those of small sizes only where there is no other."""
    ordered = sorted(lines, key=lambda line: not line.get("quick"))
    return list({(line["bench"], line["case"]): line for line in ordered}.values())


def session_table(lines: Iterable[Line]) -> list[list[str]]:
    """Rows of the README's table: spec, budget, and the reuse of each cache as a part of the
    ideal.
    """
    rows = []
    for line in latest(lines):
        if line["bench"] == "sessions":
            kind, _, budget = line["case"].partition(": ")
            rows.append(
                [
                    kind,
                    budget.partition(" of")[0],
                    *(f"{line[name]:.3f}" if name in line else "" for name in CURVES),
                ]
            )
    return rows


def draw(machines: Sequence[list[Line]], folder: Path) -> list[Path]:
    """Draw each plot from the lines of the first machine that has measured its cases.

    Returns the files.
    """
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": "plots",
            "font.size": 9,
            "axes.spines.right": False,
        }
    )
    from matplotlib import pyplot

    folder.mkdir(exist_ok=True)
    drawn = []
    for name, plot in PLOTS.items():
        for number, lines in enumerate(machines):
            figure, axes = pyplot.subplots(figsize=(5, 3), layout="constrained")
            found = plot(axes, {(line["bench"], line["case"]): line for line in lines})
            if found:
                axes.set_title(axes.get_title() + (f" ({lines[0]['device']})" if number else ""))
                axes.legend()
                drawn.append(folder / f"{name}.svg")
                figure.savefig(drawn[-1], metadata={"Date": None})
            pyplot.close(figure)
            if found:
                break
    return drawn


Cases = dict[tuple[str, str], Line]


def _decode(axes: Any, cases: Cases) -> bool:
    found = {
        int(case.split()[-1]): line
        for (bench, case), line in cases.items()
        if bench == "cache" and case[:6] == "decode"
    }
    for label, key in ((OURS, "ours_ms"), (STOCK, "stock_ms")):
        style = "o-" if label == OURS else "s--"
        axes.plot(
            sorted(found),
            [1e3 / found[n][key] for n in sorted(found)],
            style,
            color=COLORS[label],
            label=label,
        )
    axes.set(
        xscale="log",
        xlabel="tokens of context",
        ylabel="tokens per second",
        title="Decode of one sequence",
    )
    return bool(found)


def _bars(
    axes: Any, groups: dict[str, tuple[float, float]], title: str, unit: str, log: bool = False
) -> bool:
    for offset, label in ((-0.2, OURS), (0.2, STOCK)):
        values = [pair[label == STOCK] for pair in groups.values()]
        places = [place + offset for place in range(len(groups))]
        bars = axes.bar(places, values, 0.38, color=COLORS[label], label=label)
        axes.bar_label(bars, [f"{value:.3g}" for value in values])
    axes.margins(y=0.15)
    axes.set(
        xticks=range(len(groups)),
        xticklabels=list(groups),
        ylabel=unit,
        title=title,
        yscale="log" if log else "linear",
    )
    return bool(groups)


def _batch(axes: Any, cases: Cases) -> bool:
    found = {case: line for (bench, case), line in cases.items() if bench == "batch"}
    steps = {case: (line["ours_step_ms"], line["stock_step_ms"]) for case, line in found.items()}
    return _bars(axes, steps, "A decode step, ragged and padded", "ms")


def _join(axes: Any, cases: Cases) -> bool:
    found = {case: line for (bench, case), line in cases.items() if bench == "batch"}
    stalls = {case: (line["ours_stall_ms"], line["stock_stall_ms"]) for case, line in found.items()}
    return _bars(axes, stalls, "One sequence joins and leaves", "ms", log=True)


def _agents(axes: Any, cases: Cases) -> bool:
    """How many agents of the mean length a GB holds, 131 kB a token, from what blocks and
    padding waste.
    """
    line = cases.get(("engine", "5 agents of 2000 to 8000 tokens"))
    fit = 1e9 / (5000 * 131_072)
    groups = (
        {"2,000 to 8,000 tokens": (fit * (1 - line["waste"]), fit * (1 - line["padded_waste"]))}
        if line
        else {}
    )
    return _bars(axes, groups, "Agents per GB, without shared prefixes", "agents")


def _restart(axes: Any, cases: Cases) -> bool:
    line = cases.get(("store", "first token of 8192 after a restart"))
    groups = {"8,192 known tokens": (line["warm_s"], line["cold_s"])} if line else {}
    return _bars(axes, groups, "First token after a restart", "seconds", log=True)


def _sessions(axes: Any, cases: Cases) -> bool:
    found = {
        case: line
        for (bench, case), line in cases.items()
        if bench == "sessions" and case.startswith("full")
    }
    for name, (label, color, style) in CURVES.items():
        points = sorted(
            (int(case.split()[1]), line[name]) for case, line in found.items() if name in line
        )
        axes.plot(*zip(*points, strict=True), style, color=color, label=label) if points else None
    axes.set(
        xlabel="pool in % of the peak working set",
        ylabel="reuse, part of the ideal",
        title="Recorded coding sessions",
    )
    return bool(found)


PLOTS = {
    "decode": _decode,
    "batch": _batch,
    "join": _join,
    "agents": _agents,
    "restart": _restart,
    "sessions": _sessions,
}
