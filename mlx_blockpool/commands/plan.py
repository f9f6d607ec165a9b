"""`mlx-blockpool plan`: its options, and the plans worked out from config.json alone. Loads no weights."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .. import modelfile, system
from ..calculator import Memory, ModelPlan
from ..config import parse_bytes
from ..errors import BlockpoolError
from ..memory import BatchMemory, batch_memory
from . import plan_text

LENGTHS_EXAMPLE = "--lengths 500,4000,1200"
CONTEXT = "4k"
# Beyond any context and any machine; what is more is a slip of the keyboard.
LONGEST = 10**9
LARGEST = 10**15


@dataclass(frozen=True)
class Report:
    """A plan for each model, and a batch for each; one of the two may be empty."""

    models: tuple[ModelPlan, ...]
    batches: tuple[BatchMemory, ...]

    def text(self) -> str:
        models = [plan_text.describe(self.models)] if self.models else []
        return "\n\n".join([*models, *map(plan_text.describe_batch, self.batches)])

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
    parser.add_argument("--kv-bits", type=int, choices=(4, 8), help="count agents whose keys and values are quantised")
    parser.add_argument("--lengths", metavar="N,N,..", help="a batch instead: tokens of each sequence, such as 500,4000,1200")
    parser.add_argument("--json", action="store_true", help="every figure as JSON")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> str:
    report = plan(args.model or ["demo"], args.lengths, args.context, args.memory, args.kv_bits)
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


def plan(models: Sequence[str], lengths: str | None, context: str | None, memory: str | None, bits: int | None = None) -> Report:
    """For each model the batch of `lengths`, how many agents fit, or both; the agents where no option says which.

    Raises BlockpoolError for options and files that cannot be read, and for models that no plugin describes.
    """
    batch = None if lengths is None else parse_lengths(lengths)
    tokens = parse_context(CONTEXT if context is None else context)
    budget = None if memory is None else Memory(parse_memory(memory), "option")
    found = [modelfile.find(model) for model in models]
    specs = [modelfile.spec_of(file) for file in found]
    batches = tuple(batch_memory(spec, batch) for spec in specs) if batch else ()
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
