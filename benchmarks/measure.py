"""What the benchmarks share: interleaved rounds, medians, and one JSON line for each case."""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import statistics
from collections.abc import Callable
from importlib import metadata
from typing import Any

import mlx.core as mx


def options(description: str) -> argparse.Namespace:
    return options_parser(description).parse_args()


def options_parser(description: str) -> argparse.ArgumentParser:
    """The options of every benchmark."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="small sizes and few rounds")
    parser.add_argument("--out", help="append the JSON lines to this file too")
    return parser


def interleave(systems: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """The median of each system's readings, taken in turns so that a noisy minute hits all of
    them.
    """
    readings: dict[str, list[float]] = {name: [] for name in systems}
    for turn in range(rounds):
        names = list(systems) if turn % 2 else list(systems)[::-1]
        for name in names:
            readings[name].append(systems[name]())
    return {name: statistics.median(values) for name, values in readings.items()}


def report(args: argparse.Namespace, bench: str, case: str, **figures: Any) -> None:
    """One JSON line: the case, its figures, the versions and the device, and whether the sizes
    are the small ones.
    """
    quick = {"quick": True} if getattr(args, "quick", False) else {}
    line = json.dumps({"bench": bench, "case": case, **quick, **figures, **environment()})
    print(line, flush=True)
    if args.out:
        with open(args.out, "a") as out:
            out.write(line + "\n")


def environment() -> dict[str, str]:
    return {
        "mlx": metadata.version("mlx"),
        "mlx_lm": metadata.version("mlx-lm"),
        "device": str(mx.device_info().get("device_name", mx.default_device())),
        "python": platform.python_version(),
    }


def llama(
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    dtype: mx.Dtype = mx.float32,
    vocab: int = 2048,
    **changes: Any,
) -> Any:
    """A llama-type model of mlx-lm with random weights. `changes`: more of its configuration."""
    module = importlib.import_module("mlx_lm.models.llama")
    mx.random.seed(0)
    model = module.Model(
        module.ModelArgs.from_dict(
            {
                "model_type": "llama",
                "hidden_size": hidden,
                "num_hidden_layers": layers,
                "intermediate_size": hidden * 3,
                "num_attention_heads": heads,
                "num_key_value_heads": kv_heads,
                "rms_norm_eps": 1e-5,
                "vocab_size": vocab,
                **changes,
            }
        )
    )
    model.set_dtype(dtype)
    mx.eval(model.parameters())
    return model.eval()
