"""`mlx-blockpool plan`: its options, the plans worked out from config.json alone, and their tables. Loads no weights."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import modelfile, system
from ..calculator import Memory, ModelPlan, group_sizes
from ..config import GROUP_SIZES, KV_BITS, KVBits, kv_bits, parse_bytes
from ..errors import BlockpoolError
from ..formatting import count, human_bytes, table
from ..memory import BatchMemory, Comparison, GroupMemory, batch_memory
from ..spec import DTYPE_BYTES, ChunkLayer, CompositeLayer, LayerGroup, LayerSpec, StateLayer

LENGTHS_EXAMPLE = "--lengths 500,4000,1200"
CONTEXT = "4k"
# Beyond any context and any machine; what is more is a slip of the keyboard.
LONGEST = 10**9
LARGEST = 10**15
NOTHING = "-"


@dataclass(frozen=True)
class Report:
    """A plan for each model, and a batch for each; one of the two may be empty."""

    models: tuple[ModelPlan, ...]
    batches: tuple[BatchMemory, ...]

    def text(self) -> str:
        models = [describe(self.models)] if self.models else []
        return "\n\n".join([*models, *map(describe_batch, self.batches)])

    def as_dict(self) -> dict[str, Any]:
        """One model's batch alone is that batch's own report; anything else a list of models."""
        if not self.models and len(self.batches) == 1:
            return self.batches[0].as_dict()
        found = [plan.as_dict() for plan in self.models] or [{"model": batch.model_id} for batch in self.batches]
        for model, batch in zip(found, self.batches, strict=False):
            model["batch"] = batch.as_dict()
        return {"models": found}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `mlx-blockpool plan`."""
    model = "a model folder, a config.json, the id of a downloaded model, or demo, the bundled one (default); may be given again"
    parser.add_argument("--model", action="append", help=model)
    memory = "what the model and its agents may take together, such as 24GB (default: what this machine gives to a model)"
    parser.add_argument("--memory", metavar="SIZE", help=memory)
    parser.add_argument("--context", metavar="N", help="tokens of each agent, such as 8192 or 32k (default: 4k)")
    add_kv_options(parser, "count agents whose keys and values are in so many bits")
    parser.add_argument("--lengths", metavar="N,N,..", help="a batch instead: tokens of each sequence, such as 500,4000,1200")
    parser.add_argument("--json", action="store_true", help="every figure as JSON")
    parser.set_defaults(run=_run)


def add_kv_options(parser: argparse.ArgumentParser, text: str) -> None:
    """Add the options of which kv_bits_of() makes bits; `text`: what --kv-bits does."""
    parser.add_argument("--kv-bits", type=int, choices=KV_BITS, help=text)
    for what in ("keys", "values"):
        parser.add_argument(f"--kv-bits-{what}", type=int, choices=(16, *KV_BITS), help=f"the same for {what} alone")
    size = "how many quantised values share a scale and a bias (default: %(default)s)"
    parser.add_argument("--kv-group-size", type=int, choices=GROUP_SIZES, default=KVBits.group_size, help=size)


def kv_bits_of(args: argparse.Namespace) -> KVBits | None:
    return kv_bits(args.kv_bits, args.kv_bits_keys, args.kv_bits_values, args.kv_group_size)


def _run(args: argparse.Namespace) -> str:
    bits = kv_bits_of(args)
    report = plan(args.model or ["demo"], args.lengths, args.context, args.memory, bits)
    return json.dumps(report.as_dict(), indent=2) if args.json else report.text()


def join_lengths(arguments: Sequence[str]) -> list[str]:
    """`--lengths -5,3` as one argument: argparse takes -5,3 for an option, and `plan` has a better word for it."""
    joined: list[str] = []
    for argument in arguments:
        if joined[-1:] == ["--lengths"] and re.match(r"-\d", argument):
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    return joined


def plan(
    models: Sequence[str], lengths: str | None, context: str | None, memory: str | None, bits: KVBits | None = None
) -> Report:
    """For each model the batch of `lengths`, how many agents fit, or both; the agents where no option says which.

    Raises BlockpoolError for options and files that cannot be read, and for models that no plugin describes.
    """
    batch = None if lengths is None else parse_lengths(lengths)
    tokens = parse_context(CONTEXT if context is None else context)
    budget = None if memory is None else Memory(parse_memory(memory), "option")
    found = [modelfile.find(model) for model in models]
    specs = [modelfile.spec_of(file) for file in found]
    batches = tuple(batch_memory(spec.with_bits(bits), batch) for spec in specs) if batch else ()
    if batch and context is None and memory is None and bits is None:
        return Report((), batches)
    budget = budget or Memory(system.memory_bytes(), "machine")
    plans = [
        ModelPlan(spec, file.model_type, modelfile.weights_of(file), budget, tokens, bits, file.longest_context)
        for file, spec in zip(found, specs, strict=True)
    ]
    return Report(tuple(plans), batches)


def parse_lengths(text: str) -> list[int]:
    """'500,4000,1200' as tokens of each sequence. Raises BlockpoolError on anything but whole numbers from 1 to LONGEST."""
    if not text.strip():
        raise BlockpoolError(f"--lengths is empty. Write the tokens of each sequence, such as {LENGTHS_EXAMPLE}.")
    return [_length(part.strip()) for part in text.split(",")]


def parse_context(text: str) -> int:
    """'8192', '4k' (4,096) or '1m' in tokens. Raises BlockpoolError on anything else, 0 and more than LONGEST."""
    found = re.fullmatch(r"([0-9]{1,10})([km]?)", text.strip().lower())
    tokens = int(found[1]) * {"": 1, "k": 2**10, "m": 2**20}[found[2]] if found else 0
    if not 1 <= tokens <= LONGEST:
        raise BlockpoolError(
            f"{text!r} is no context: it is a whole number of tokens from 1 to {LONGEST:,}. Write --context 8192 or 8k."
        )
    return tokens


def parse_memory(text: str) -> int:
    """'24GB' in bytes. Raises BlockpoolError on anything else, on 0 and on more than LARGEST."""
    try:
        size = parse_bytes(text)
    except (BlockpoolError, OverflowError):
        size = 0
    if not 1 <= size <= LARGEST:
        raise BlockpoolError(f"{text!r} is no memory that model and agents may take together. Write --memory 24GB or 24GiB.")
    return size


def _length(text: str) -> int:
    found = re.fullmatch(r"0*([1-9][0-9]{0,9})", text)
    if found is None or int(found[1]) > LONGEST:
        raise BlockpoolError(
            f"{text!r} is no length: lengths are whole numbers of tokens from 1 to {LONGEST:,}. Write {LENGTHS_EXAMPLE}."
        )
    return int(found[1])


# -- in words and tables -------------------------------------------------------------------------------------------------


def describe(plans: Sequence[ModelPlan]) -> str:
    """One plan in full, or several in one table with a line each."""
    return _describe_one(plans[0]) if len(plans) == 1 else _describe_several(plans)


# -- one model ---------------------------------------------------------------------------------------------------------


def _describe_one(plan: ModelPlan) -> str:
    kv = "" if plan.bits is None else f", {plan.bits}"
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
    shown = list(dict.fromkeys((None, KVBits(8, 8, plan.group_size), plan.bits)))
    costs = [plan.costs[bits] for bits in shown]
    rows = [["", *(_bits(plan, bits) for bits in shown)]]
    rows.append(["one more token", *(_size(cost.per_token) for cost in costs)])
    if costs[0].fixed:
        rows.append(["fixed, at most", *(human_bytes(cost.fixed) for cost in costs)])
    rows.append([f"one agent of {plan.tokens:,} tokens", *(human_bytes(cost.agent) for cost in costs)])
    rows.append(["one checkpoint", *(human_bytes(cost.checkpoint) if cost.checkpoint else "none" for cost in costs)])
    return [*rows, ["agents that fit", *(f"{cost.agents(plan.left):,}" for cost in costs)]]


def _sum_lines(plan: ModelPlan) -> list[str]:
    """How the agents that fit come about, a term a line."""
    left = human_bytes(plan.left) if plan.left > 0 else "nothing"
    how = f"{plan.tokens:,} tokens, {_bits(plan, plan.bits)}, nothing shared"
    terms = [
        ("  memory", human_bytes(plan.memory.bytes), "--memory" if plan.memory.source == "option" else "of this machine"),
        ("- weights", "unknown" if plan.weights.bytes is None else human_bytes(plan.weights.bytes), _weights_source(plan)),
        ("= left for agents", left, ""),
        ("/ one agent", human_bytes(plan.cost.agent), how),
        ("= agents that fit", f"{plan.agents:,}", ""),
    ]
    sums = table([[name, figure] for name, figure, _ in terms])
    return [f"{line}  {note}".rstrip() for line, (_, _, note) in zip(sums, terms, strict=True)]


def _weights_source(plan: ModelPlan) -> str:
    weights = plan.weights
    if weights.parameters is None:
        return {"files": "its files", "index": "the index of its files"}.get(weights.source, "")
    kind = plan.spec.dtype if weights.bits is None else f"{weights.bits}-bit"
    return f"estimate: {weights.parameters / 1e9:,.1f} billion parameters, {kind}"


# -- several models ----------------------------------------------------------------------------------------------------


def _describe_several(plans: Sequence[ModelPlan]) -> str:
    first = plans[0]
    bits = first.bits or KVBits()
    source = "--memory" if first.memory.source == "option" else "this machine"
    rows = [
        ["model", "weights", "one token", "fixed", "one agent", _bits(first, bits), "checkpoint", "agents", _bits(first, bits)]
    ]
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
    half = plan.cost.agents(plan.left // 2)
    command = f"`mlx-blockpool serve{f' {plan.bits.options}' if plan.bits else ''}`"
    return f"{command} takes half of what is left unless --pool-bytes says more: {count(half, 'agent')}."


def _kv_notes(plans: Sequence[ModelPlan]) -> list[str]:
    bits = plans[0].bits or KVBits()
    sizes = {dim: size for plan in plans for dim, size in group_sizes(plan.spec, bits).items()}
    notes = []
    found = sorted({size for size in sizes.values() if size is not None}, reverse=True)
    if found:
        # Heads that are no multiple of the group size have smaller groups.
        text = f"{_bits(plans[0], bits)} counts the scale and the bias of each {found[0]} values"
        notes.append(text + "".join(f"; of each {size} in heads of {_heads(sizes, size)}" for size in found[1:]) + ".")
    if None in sizes.values():
        notes.append(f"Heads of {_heads(sizes, None)} values are no multiple of {min(GROUP_SIZES)}, and stay as they are.")
    return notes


def _heads(sizes: dict[int, int | None], size: int | None) -> str:
    return ", ".join(str(dim) for dim in sorted(sizes) if sizes[dim] == size)


def _bits(plan: ModelPlan, bits: KVBits | None) -> str:
    own = 8 * DTYPE_BYTES[plan.spec.dtype]
    found = (own, own) if bits is None else (bits.keys or own, bits.values or own)
    return "/".join(map(str, dict.fromkeys(found))) + "-bit"


def _size(of: int) -> str:
    return human_bytes(of) if of else NOTHING


def describe_batch(report: BatchMemory) -> str:
    """The report as two tables, tokens of each sequence and bytes of each layer group, and a closing sentence."""
    leading = _leading(report)
    where = f"; tokens of {leading.group.name}" if len(report.groups) > 1 else ""
    bits = "" if report.bits is None else f", {report.bits} in the pool"
    lines = [f"{report.model_id}, {report.dtype}: {count(len(report.lengths), 'sequence')}{where}{bits}", ""]
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
