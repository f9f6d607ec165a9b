"""`mlx-blockpool plan`: its options, the plans computed from config.json alone, and their tables.

Loads no weights.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path

from ..config import GROUP_SIZES, KV_BITS, KVBits, kv_bits, parse_bytes
from ..errors import BlockpoolError
from ..formatting import count, human_bytes, table
from ..model_files import device, modelfile
from ..model_files.calculator import Memory, ModelPlan
from ..spec import DTYPE_BYTES, ChunkLayer, CompositeLayer, LayerGroup, LayerSpec, StateLayer

CONTEXT = "32k"
NOTHING = "-"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `mlx-blockpool plan`."""
    model = (
        "a model folder, a config.json, the id of a downloaded model, or demo, the bundled one "
        "(default); may be repeated"
    )
    parser.add_argument("--model", action="append", help=model)
    memory = (
        "memory for the model and its agents together, such as 16GB (default: what this machine "
        "allows; a Mac leaves about two thirds to its GPU, from 64 GB on three quarters)"
    )
    parser.add_argument("--memory", metavar="SIZE", help=memory)
    context = "tokens of each agent, such as 8192 or 32k (default: %(default)s)"
    parser.add_argument("--context", metavar="N", default=CONTEXT, help=context)
    shared = "tokens at their beginning that agents share, such as 16k (default: none)"
    parser.add_argument("--shared", metavar="N", help=shared)
    add_kv_options(parser, "count agents whose keys and values have this many bits")
    parser.add_argument("--json", action="store_true", help="every figure as JSON")
    parser.set_defaults(run=_run)


def add_kv_options(parser: argparse.ArgumentParser, text: str) -> None:
    """Add the options that kv_bits_of() reads. `text`: the help of --kv-bits."""
    parser.add_argument("--kv-bits", type=int, choices=KV_BITS, help=text)
    for what in ("keys", "values"):
        parser.add_argument(
            f"--kv-bits-{what}", type=int, choices=(16, *KV_BITS), help=f"the same for {what} alone"
        )
    size = "how many quantised values share a scale and a bias (default: %(default)s)"
    parser.add_argument(
        "--kv-group-size", type=int, choices=GROUP_SIZES, default=KVBits.group_size, help=size
    )


def kv_bits_of(args: argparse.Namespace) -> KVBits | None:
    return kv_bits(args.kv_bits, args.kv_bits_keys, args.kv_bits_values, args.kv_group_size)


def _run(args: argparse.Namespace) -> str:
    plans = plan(args.model or ["demo"], args.context, args.memory, kv_bits_of(args), args.shared)
    return (
        json.dumps({"models": [each.as_dict() for each in plans]}, indent=2)
        if args.json
        else describe(plans)
    )


def plan(
    models: Sequence[str],
    context: str,
    memory: str | None,
    bits: KVBits | None = None,
    shared: str | None = None,
) -> list[ModelPlan]:
    """For each model the number of agents that fit.

    Raises BlockpoolError for options and files that cannot be read, and for models that no plugin
    describes.
    """
    tokens = parse_context(context)
    num_shared = 0 if shared is None else parse_context(shared, "--shared")
    if num_shared >= tokens:
        raise BlockpoolError(f"--shared must be less than --context (got {shared} of {context})")
    budget = (
        Memory(device.memory_bytes(), "machine")
        if memory is None
        else Memory(parse_memory(memory), "option")
    )
    found = [(file, modelfile.spec_of(file)) for file in map(modelfile.find, models)]
    return [
        ModelPlan(
            spec,
            file.model_type,
            modelfile.weights_of(file),
            budget,
            tokens,
            bits,
            file.longest_context,
            num_shared,
        )
        for file, spec in found
    ]


def parse_context(text: str, option: str = "--context") -> int:
    """'8192', '4k' (4,096) or '1m' in tokens. Raises BlockpoolError on anything else and on 0."""
    found = re.fullmatch(r"([0-9]{1,10})([km]?)", text.strip().lower())
    tokens = int(found[1]) * {"": 1, "k": 2**10, "m": 2**20}[found[2]] if found else 0
    if not tokens:
        raise BlockpoolError(
            f"{option} must be a whole number of tokens from 1 on, e.g. 8192 or 8k (got {text!r})"
        )
    return tokens


def parse_memory(text: str) -> int:
    """'24GB' in bytes. Raises BlockpoolError on anything else and on 0."""
    try:
        size = parse_bytes(text)
    except (BlockpoolError, OverflowError):
        size = 0
    if not size:
        raise BlockpoolError(f"--memory must be a size such as 24GB or 24GiB (got {text!r})")
    return size


# -- in words and tables ---------------------------------------------------------------------------


def describe(plans: Sequence[ModelPlan]) -> str:
    """One plan in full, or several in one table with a line each."""
    return _describe_one(plans[0]) if len(plans) == 1 else _describe_several(plans)


# -- one model -------------------------------------------------------------------------------------


def _describe_one(plan: ModelPlan) -> str:
    kv = "" if plan.bits is None else f", {plan.bits}"
    lines = [
        f"{plan.spec.model_id}, {plan.spec.dtype}: {count(len(plan.spec.layers), 'layer')}{kv}",
        "",
    ]
    lines += [
        *table(_layer_rows(plan)),
        "",
        *table(_cost_rows(plan)),
        "",
        *_sum_lines(plan),
        "",
        *_notes([plan]),
    ]
    return "\n".join(lines)


def _layer_rows(plan: ModelPlan) -> list[list[str]]:
    rows = [["layers", "one token", "one block", "at most", f"at {plan.tokens:,} tokens"]]
    for cost in plan.cost.layers:
        at_most = "grows" if cost.at_most is None else _size(cost.at_most)
        rows.append(
            [
                _words(cost.layer, cost.indices),
                _size(cost.per_token),
                _size(cost.per_block),
                at_most,
                _size(cost.agent),
            ]
        )
    return rows


def _words(layer: LayerSpec, indices: tuple[int, ...]) -> str:
    """Like the name of a LayerGroup."""
    if isinstance(layer, CompositeLayer):
        return (
            f"composite x{len(indices)} "
            f"({' + '.join(_words(part, (0,)).replace(' x1', '') for part in layer.parts)})"
        )
    if isinstance(layer, StateLayer):
        shapes = ", ".join("x".join(map(str, shape[1:])) for shape, _ in layer.arrays)
        return f"state x{len(indices)} ({shapes})" if shapes else f"state x{len(indices)}"
    if not layer.values_per_token:
        return f"unused x{len(indices)}"
    name = LayerGroup(layer, indices).name
    return (
        name.replace("chunk", f"chunk {layer.chunk_size}", 1)
        if isinstance(layer, ChunkLayer)
        else name
    )


def _cost_rows(plan: ModelPlan) -> list[list[str]]:
    shown = list(dict.fromkeys((None, KVBits(8, 8, plan.group_size), plan.bits)))
    costs = [plan.costs[bits] for bits in shown]
    rows = [["", *(_bits(plan, bits) for bits in shown)]]
    rows.append(["one more token", *(_size(cost.per_token) for cost in costs)])
    if costs[0].fixed:
        rows.append(["fixed, at most", *(human_bytes(cost.fixed) for cost in costs)])
    rows.append(
        [f"one agent of {plan.tokens:,} tokens", *(human_bytes(cost.agent) for cost in costs)]
    )
    rows.append(
        [
            "one checkpoint",
            *(human_bytes(cost.checkpoint) if cost.checkpoint else "none" for cost in costs),
        ]
    )
    return [*rows, ["agents that fit", *(f"{cost.agents(plan.left):,}" for cost in costs)]]


def _sum_lines(plan: ModelPlan) -> list[str]:
    """The calculation of the number of agents, one term on each line."""
    left = human_bytes(plan.left) if plan.left > 0 else "nothing"
    how = f"{plan.tokens:,} tokens, {_bits(plan, plan.bits)}, {_shared(plan)}"
    shared = [("- shared prefix", human_bytes(plan.cost.shared), "held once")]
    terms = [
        (
            "  memory",
            human_bytes(plan.memory.bytes),
            "--memory" if plan.memory.source == "option" else "of this machine",
        ),
        (
            "- weights",
            "unknown" if plan.weights.bytes is None else human_bytes(plan.weights.bytes),
            _weights_source(plan),
        ),
        ("= left for agents", left, ""),
        *(shared if plan.shared else ()),
        ("/ one agent", human_bytes(plan.cost.agent - plan.cost.shared), how),
        ("= agents that fit", f"{plan.agents:,}", ""),
    ]
    sums = table([[name, figure] for name, figure, _ in terms])
    return [f"{line}  {note}".rstrip() for line, (_, _, note) in zip(sums, terms, strict=True)]


def _shared(plan: ModelPlan) -> str:
    return f"{plan.shared:,} of them shared" if plan.shared else "nothing shared"


def _weights_source(plan: ModelPlan) -> str:
    weights = plan.weights
    if weights.parameters is None:
        return {"files": "its files", "index": "the index of its files"}.get(weights.source, "")
    kind = plan.spec.dtype if weights.bits is None else f"{weights.bits}-bit"
    return f"estimate: {weights.parameters / 1e9:,.1f} billion parameters, {kind}"


# -- several models --------------------------------------------------------------------------------


def _describe_several(plans: Sequence[ModelPlan]) -> str:
    first = plans[0]
    bits = first.bits or KVBits()
    source = "--memory" if first.memory.source == "option" else "this machine"
    rows = [
        [
            "model",
            "weights",
            "one token",
            "fixed",
            "one agent",
            _bits(first, bits),
            "checkpoint",
            "agents",
            _bits(first, bits),
        ]
    ]
    for plan, name in zip(plans, _short_names(plans), strict=True):
        own, fewer = plan.costs[None], plan.costs[bits]
        weights = "unknown" if plan.weights.bytes is None else human_bytes(plan.weights.bytes)
        rows.append(
            [
                name,
                f"~{weights}" if plan.weights.source == "estimate" else weights,
                _size(own.per_token),
                _size(own.fixed),
                human_bytes(own.agent),
                human_bytes(fewer.agent),
                _size(own.checkpoint),
                f"{own.agents(plan.left):,}",
                f"{fewer.agents(plan.left):,}",
            ]
        )
    memory = f"{human_bytes(first.memory.bytes)} ({source})"
    title = f"Agents of {first.tokens:,} tokens, {_shared(first)}, in {memory} less the weights"
    return "\n".join([title, "", *table(rows), "", *_notes(plans)])


def _short_names(plans: Sequence[ModelPlan]) -> list[str]:
    """The last telling part of each path; the names as given if two of these would be the same."""
    given = [plan.spec.model_id for plan in plans]
    paths = [Path(name) for name in given]
    short = [
        (path.parent if path.name == "config.json" else path).name or name
        for path, name in zip(paths, given, strict=True)
    ]
    return short if len(set(short)) == len(set(given)) else given


# -- what the figures mean -------------------------------------------------------------------------


def _notes(plans: Sequence[ModelPlan]) -> list[str]:
    notes = [_verdict(plans[0])] if len(plans) == 1 else []
    if len(plans) > 1 and any(plan.weights.source == "estimate" for plan in plans):
        notes.append("~ is an estimate from config.json.")
    too_long = [plan for plan in plans if plan.longest is not None and plan.tokens > plan.longest]
    return notes + [
        f"{plan.spec.model_id}: its config.json says {plan.longest:,} tokens at most."
        for plan in too_long
    ]


def _verdict(plan: ModelPlan) -> str:
    if plan.left <= 0:
        return f"The weights alone take {human_bytes(-plan.left)} more than the memory."
    if not plan.agents:
        advice = "a shorter --context" if plan.bits else "a shorter --context, or --kv-bits 8,"
        return (
            f"One agent needs {human_bytes(plan.cost.agent - plan.left)} more; {advice} takes less."
        )
    half = plan.cost.agents(plan.left // 2)
    command = f"`mlx-blockpool serve{f' {plan.bits.options}' if plan.bits else ''}`"
    return (
        f"{command} takes half of what is left unless --pool-bytes says more: "
        f"{count(half, 'agent')}."
    )


def _bits(plan: ModelPlan, bits: KVBits | None) -> str:
    own = 8 * DTYPE_BYTES[plan.spec.dtype]
    found = (own, own) if bits is None else (bits.keys or own, bits.values or own)
    return "/".join(map(str, dict.fromkeys(found))) + "-bit"


def _size(of: int) -> str:
    return human_bytes(of) if of else NOTHING
