"""A batch in words and tables: what it takes in blocks, and padded as mlx-lm batches."""

from __future__ import annotations

from collections.abc import Sequence

from .memory import BatchMemory, Comparison, GroupMemory
from .wording import count, human_bytes, table


def describe(report: BatchMemory) -> str:
    """The report as two tables, tokens of each sequence and bytes of each layer group, and a closing sentence."""
    leading = _leading(report)
    where = f"; tokens of {leading.group.name}" if len(report.groups) > 1 else ""
    lines = [f"{report.model_id}, {report.dtype}: {count(len(report.lengths), 'sequence')}{where}", ""]
    lines += [*table(_sequence_rows(report.lengths, leading)), "", *table(_byte_rows(report)), "", _verdict(report)]
    return "\n".join(lines)


def _sequence_rows(lengths: Sequence[int], group: GroupMemory) -> list[list[str]]:
    rows = [["sequence", "tokens", "padded waste", "pool waste"]]
    for number, (length, tokens) in enumerate(zip(lengths, group.sequences, strict=True), 1):
        rows.append([str(number), f"{length:,}", f"{tokens.padded.waste:,}", f"{tokens.pool.waste:,}"])
    return [*rows, ["all", f"{sum(lengths):,}", f"{group.tokens.padded.waste:,}", f"{group.tokens.pool.waste:,}"]]


def _leading(report: BatchMemory) -> GroupMemory:
    """The group whose tokens say most: one that grows with the context, else the largest window."""
    return max(report.groups, key=lambda g: (g.group.layer.max_blocks is None, g.tokens.padded.allocated))


def _byte_rows(report: BatchMemory) -> list[list[str]]:
    rows = [["layers", "used", "padded", "waste", "", "pool", "waste", ""]]
    rows += [[g.group.name, *_byte_cells(g.bytes)] for g in report.groups]
    return rows if len(report.groups) == 1 else [*rows, ["all", *_byte_cells(report.bytes)]]


def _byte_cells(of: Comparison) -> list[str]:
    cells = [human_bytes(of.padded.used)]
    for side in (of.padded, of.pool):
        cells += [human_bytes(side.allocated), human_bytes(side.waste), f"{side.waste_share:.0%}"]
    return cells


def _verdict(report: BatchMemory) -> str:
    of = report.bytes
    padded, pool, grown = (human_bytes(side.allocated) for side in (of.padded, of.pool, of.grown))
    if report.other_layers:
        others = count(report.other_layers, "other layer")
        return (
            f"The pool would take {pool} instead of {padded}, but {others} cannot live in blocks: mlx-lm's own caches serve it."
        )
    change = "the same"
    if of.saved:
        change = f"{of.saved / of.padded.allocated:.0%} less" if of.saved > 0 else f"{human_bytes(-of.saved)} more"
    return f"The pool takes {pool} instead of {padded}, {change}; as it decodes, mlx-lm's padded batch grows to {grown}."
