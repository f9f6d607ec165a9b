"""The room of `mlx-blockpool plan`: reads what was asked, describes the model from its config alone, and words the report.

Loads no weights. Does not know argparse; cli.py says which options there are and prints.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .demo import model_path
from .errors import BlockpoolError, PluginError, SpecError
from .memory import BatchMemory, Comparison, GroupMemory
from .plugins import spec_from_config
from .spec import FullLayer, ModelCacheSpec
from .wording import count, human_bytes, table

LENGTHS_EXAMPLE = "--lengths 500,4000,1200"
# Beyond any context; what is longer is a slip of the keyboard.
LONGEST = 10**9


def parse_lengths(text: str | None) -> list[int]:
    """'500,4000,1200' as tokens of each sequence. Raises BlockpoolError on anything but whole numbers from 1 to LONGEST."""
    if text is None or not text.strip():
        raise BlockpoolError(f"Found no lengths; needed the tokens of each sequence, such as {LENGTHS_EXAMPLE}.")
    return [_length(part.strip()) for part in text.split(",")]


def _length(text: str) -> int:
    digits = text.lstrip("0") if text.isascii() and text.isdigit() else ""
    if not digits or len(digits) > len(str(LONGEST)) or int(digits) > LONGEST:
        raise BlockpoolError(
            f"Found {text!r} among the lengths; needed tokens as whole numbers from 1 to {LONGEST:,}. Write {LENGTHS_EXAMPLE}."
        )
    return int(digits)


def spec_at(model: str) -> ModelCacheSpec:
    """The spec of `demo`, of a model folder or of a config.json. Raises BlockpoolError if there is none or it says too little."""
    path = _config_path(model)
    config = _read_config(path)
    try:
        return _checked(spec_from_config(config, model))
    except (SpecError, PluginError) as error:
        # mlx-lm's own messages may have several lines.
        found = " ".join(str(error).split()).rstrip(".")
        raise SpecError(
            f"{found}. Needed a config.json that describes an mlx-lm model; check {path} or install a plugin for it."
        ) from error


def _checked(spec: ModelCacheSpec) -> ModelCacheSpec:
    """Providers copy figures from config.json as they are."""
    for index, layer in enumerate(spec.layers):
        if isinstance(layer, FullLayer):
            figures = asdict(layer)
            if not all(type(n) is int and n >= 0 for n in figures.values()) or figures.get("max_size") == 0:
                raise SpecError(f"{spec.model_id}: found {layer} as layer {index}, whose figures are no sizes")
    return spec


def _config_path(model: str) -> Path:
    path = Path(model_path() if model == "demo" else model)
    path = path / "config.json" if os.path.isdir(path) else path
    if not os.path.isfile(path):
        raise BlockpoolError(
            f"Found no file {path}; needed a model folder or its config.json. Give --model the path of one, or demo."
        )
    return path


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BlockpoolError(f"Cannot read {path}: {error}. Needed the config.json of a model.") from error
    if not isinstance(config, dict):
        raise BlockpoolError(f"Found a {type(config).__name__} in {path}; needed the config.json of a model, a JSON object.")
    return config


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
