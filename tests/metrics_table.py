"""The table of all metrics, from the code that reports them.

`python tests/metrics_table.py` writes it into the README of the package.
"""

from __future__ import annotations

from pathlib import Path

from mlx_blockpool.server.watch.metrics import OF_MODELS, OF_SERVER, Figure

DOCUMENT = Path(__file__).parent.parent / "mlx_blockpool/server/watch/README.md"
BEGIN, END = "<!-- metrics -->\n", "<!-- end of metrics -->\n"
COMMAND = ".venv/bin/python tests/metrics_table.py"


def render() -> str:
    lines = ["", "| metric | type | labels | meaning |", "|---|---|---|---|"]
    lines += [row(figure, ("model_name", *figure.labels)) for figure in OF_MODELS]
    lines += [row(figure, figure.labels) for figure in OF_SERVER]
    return "\n".join([*lines, "", ""])


def shown_name(figure: Figure) -> str:
    """The name under which queries find a metric."""
    return f"{figure.name}_total" if figure.kind == "counter" else figure.name


def row(figure: Figure, labels: tuple[str, ...]) -> str:
    return (
        f"| `{shown_name(figure)}` | {figure.kind} | "
        f"{', '.join(f'`{label}`' for label in labels)} | {figure.help} |"
    )


def in_document() -> str:
    """The table in the document."""
    text = DOCUMENT.read_text(encoding="utf-8")
    return text[text.index(BEGIN) + len(BEGIN) : text.index(END)]


def main() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    DOCUMENT.write_text(text[:begin] + render() + text[end:], encoding="utf-8")


if __name__ == "__main__":
    main()
