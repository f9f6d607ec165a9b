"""What one model costs, or several side by side, and what a batch takes in blocks and padded: in words and tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..calculator import KV_BITS, ModelPlan, unquantisable
from ..formatting import count, human_bytes, table
from ..memory import BatchMemory, Comparison, GroupMemory
from ..spec import GROUP_SIZE, ChunkLayer, CompositeLayer, LayerGroup, LayerSpec, StateLayer

NOTHING = "-"


def describe(plans: Sequence[ModelPlan]) -> str:
    """One plan in full, or several in one table with a line each."""
    return _describe_one(plans[0]) if len(plans) == 1 else _describe_several(plans)


# -- one model ---------------------------------------------------------------------------------------------------------


def _describe_one(plan: ModelPlan) -> str:
    kv = "" if plan.bits is None else f", keys and values in {plan.bits} bits"
    lines = [f"{plan.spec.model_id}, {plan.spec.dtype}: {count(len(plan.spec.layers), 'layer')}{kv}", ""]
    lines += [*table(_layer_rows(plan)), "", *table(_cost_rows(plan)), "", *_sum_lines(plan), "", *_notes([plan])]
    return "\n".join(lines)


def _layer_rows(plan: ModelPlan) -> list[list[str]]:
    rows = [["layers", "one token", "one block", "at most", f"at {plan.tokens:,} tokens"]]
    for cost in plan.cost.layers:
        at_most = "grows" if cost.at_most is None else _size(cost.at_most)
        rows.append([_words(cost.layer, cost.indices), _size(cost.per_token), _size(cost.per_block), at_most, _size(cost.agent)])
    return rows


def _words(layer: LayerSpec, indices: tuple[int, ...]) -> str:
    """Like the name of a LayerGroup."""
    if isinstance(layer, CompositeLayer):
        return f"composite x{len(indices)} ({' + '.join(_words(part, (0,)).replace(' x1', '') for part in layer.parts)})"
    if isinstance(layer, StateLayer):
        shapes = ", ".join("x".join(map(str, shape[1:])) for shape, _ in layer.arrays)
        return f"state x{len(indices)} ({shapes})" if shapes else f"state x{len(indices)}"
    if not layer.values_per_token:
        return f"unused x{len(indices)}"
    name = LayerGroup(layer, indices).name
    return name.replace("chunk", f"chunk {layer.chunk_size}", 1) if isinstance(layer, ChunkLayer) else name


def _cost_rows(plan: ModelPlan) -> list[list[str]]:
    shown = list(dict.fromkeys((None, 8, plan.bits)))
    costs = [plan.costs[bits] for bits in shown]
    rows = [["", *(f"{plan.spec.bits_per_value(bits)}-bit" for bits in shown)]]
    rows.append(["one more token", *(_size(cost.per_token) for cost in costs)])
    if costs[0].fixed:
        rows.append(["fixed, at most", *(human_bytes(cost.fixed) for cost in costs)])
    rows.append([f"one agent of {plan.tokens:,} tokens", *(human_bytes(cost.agent) for cost in costs)])
    rows.append(["one checkpoint", *(human_bytes(cost.checkpoint) if cost.checkpoint else "none" for cost in costs)])
    return [*rows, ["agents that fit", *(f"{cost.agents(plan.left):,}" for cost in costs)]]


def _sum_lines(plan: ModelPlan) -> list[str]:
    """How the agents that fit come about, a term a line."""
    left = human_bytes(plan.left) if plan.left > 0 else "nothing"
    how = f"{plan.tokens:,} tokens, {plan.spec.bits_per_value(plan.bits)}-bit, nothing shared"
    terms = [
        ("  memory", human_bytes(plan.memory.bytes), "--memory" if plan.memory.source == "option" else "of this machine"),
        ("- weights", "unknown" if plan.weights.bytes is None else human_bytes(plan.weights.bytes), _weights_source(plan)),
        ("= left for agents", left, ""),
        ("/ one agent", human_bytes(plan.cost.agent), how),
        ("= agents that fit", f"{plan.agents:,}", ""),
    ]
    sums = table([[name, figure] for name, figure, _ in terms])
    return [f"{line}  {said}".rstrip() for line, (_, _, said) in zip(sums, terms, strict=True)]


def _weights_source(plan: ModelPlan) -> str:
    weights = plan.weights
    if weights.parameters is None:
        return {"files": "its files", "index": "the index of its files"}.get(weights.source, "")
    kind = plan.spec.dtype if weights.bits is None else f"{weights.bits}-bit"
    return f"estimate: {weights.parameters / 1e9:,.1f} billion parameters, {kind}"


# -- several models ----------------------------------------------------------------------------------------------------


def _describe_several(plans: Sequence[ModelPlan]) -> str:
    first = plans[0]
    bits = first.bits or KV_BITS[0]
    source = "--memory" if first.memory.source == "option" else "this machine"
    rows = [["model", "weights", "one token", "fixed", "one agent", f"{bits}-bit", "checkpoint", "agents", f"{bits}-bit"]]
    for plan, name in zip(plans, _short_names(plans), strict=True):
        own, fewer = plan.costs[None], plan.costs[bits]
        weights = "unknown" if plan.weights.bytes is None else human_bytes(plan.weights.bytes)
        rows.append([name, f"~{weights}" if plan.weights.source == "estimate" else weights])
        rows[-1] += [_size(own.per_token), _size(own.fixed), human_bytes(own.agent), human_bytes(fewer.agent)]
        rows[-1] += [_size(own.checkpoint), f"{own.agents(plan.left):,}", f"{fewer.agents(plan.left):,}"]
    title = f"Agents of {first.tokens:,} tokens, nothing shared, in {human_bytes(first.memory.bytes)} ({source}) less the weights"
    return "\n".join([title, "", *table(rows), "", *_notes(plans)])


def _short_names(plans: Sequence[ModelPlan]) -> list[str]:
    """The last part of each path that says something; as they were given where two would be the same."""
    given = [plan.spec.model_id for plan in plans]
    paths = [Path(name) for name in given]
    short = [(path.parent if path.name == "config.json" else path).name or name for path, name in zip(paths, given, strict=True)]
    return short if len(set(short)) == len(set(given)) else given


# -- what the figures mean ---------------------------------------------------------------------------------------------


def _notes(plans: Sequence[ModelPlan]) -> list[str]:
    notes = [_verdict(plans[0])] if len(plans) == 1 else []
    if len(plans) > 1 and any(plan.weights.source == "estimate" for plan in plans):
        notes.append("~ is an estimate from config.json.")
    too_long = [plan for plan in plans if plan.longest is not None and plan.tokens > plan.longest]
    notes += _kv_notes(plans)
    return notes + [f"{plan.spec.model_id}: its config.json says {plan.longest:,} tokens at most." for plan in too_long]


def _verdict(plan: ModelPlan) -> str:
    if plan.left <= 0:
        return f"The weights alone take {human_bytes(-plan.left)} more than there is."
    if not plan.agents:
        advice = "a shorter --context" if plan.bits else "a shorter --context, or --kv-bits 8,"
        return f"One agent needs {human_bytes(plan.cost.agent - plan.left)} more; {advice} takes less."
    if plan.bits:
        return f"`mlx-blockpool serve --kv-bits {plan.bits}` answers one request at a time, on mlx-lm's own caches."
    half = plan.cost.agents(plan.left // 2)
    return f"`mlx-blockpool serve` takes half of what is left unless --pool-bytes says more: {count(half, 'agent')}."


def _kv_notes(plans: Sequence[ModelPlan]) -> list[str]:
    bits, notes = plans[0].bits or KV_BITS[0], []
    if any(plan.costs[bits].agent != plan.costs[None].agent for plan in plans):
        notes.append(f"{bits}-bit counts the scale and the bias of each {GROUP_SIZE} values.")
    odd = sorted({dim for plan in plans for dim in unquantisable(plan.spec)})
    if odd:
        notes.append(f"Heads of {', '.join(map(str, odd))} values are no multiple of {GROUP_SIZE}: mlx does not quantise them.")
    if any(leaf.kind == "window" for plan in plans for leaf in plan.spec.leaves):
        notes.append("It counts windows too; mlx-lm's own --kv-bits does not quantise those.")
    return notes


def _size(of: int) -> str:
    return human_bytes(of) if of else NOTHING


def describe_batch(report: BatchMemory) -> str:
    """The report as two tables, tokens of each sequence and bytes of each layer group, and a closing sentence."""
    leading = _leading(report)
    where = f"; tokens of {leading.group.name}" if len(report.groups) > 1 else ""
    lines = [f"{report.model_id}, {report.dtype}: {count(len(report.lengths), 'sequence')}{where}", ""]
    lines += [*table(_sequence_rows(report.lengths, leading)), "", *table(_byte_rows(report)), "", _batch_verdict(report)]
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


def _batch_verdict(report: BatchMemory) -> str:
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
