"""Checks of a provider's spec, and of one sequence on pooled caches.

Each takes a Subject and returns what it looked at, in words. Raises ConformanceError, or NotCheckedError where there is nothing.
"""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

from ..errors import BlockpoolError, SpecError
from ..kv.factory import pooled_caches
from ..plugins import check_spec
from ..spec import BLOCK_TOKENS
from .outcome import ConformanceError, NotCheckedError
from .runs import Parts, cold, distance, exactly, run, same
from .subject import MOST_TOKENS, Subject

STRANGERS: tuple[dict[str, Any], ...] = (
    {},
    {"model_type": "of_somebody_else"},
    {"model_type": "of_somebody_else", "text_config": {"model_type": "llama"}},
)
STEPS = 6
# A decode that goes around a long window once more would take long.
LONG_DECODE = 70
# Weights under which another token changes less, in parts of the largest logit, would pass anything.
TELLING = 1e-3


def check_provider(subject: Subject) -> str:
    """The provider describes the model and does not modify its config."""
    config = copy.deepcopy(subject.config)
    try:
        found = subject.spec
        subject.describe(subject.model, config)
    except SpecError as error:
        raise ConformanceError(f"SpecError: {error}", "a spec of the loaded model", "Read its shapes from `model`.") from error
    except BlockpoolError as error:
        raise ConformanceError(str(error), "a ModelCacheSpec", "Mend the hook.") from error
    if config != subject.config:
        keys = sorted(k for k in {*config, *subject.config} if config.get(k) != subject.config.get(k))
        raise ConformanceError(
            f"a config with other {', '.join(keys)} afterwards", "the one that was given", "Copy before writing."
        )
    return f"{len(found.layers)} layers, fingerprint {found.fingerprint()}"


def check_others(subject: Subject) -> str:
    """The provider returns None for models of other types, whatever their config.json contains."""
    for config in STRANGERS:
        try:
            found = subject.describe(None, copy.deepcopy(config))
        except SpecError:
            continue
        except BlockpoolError as error:
            hint = "Look at model_type first, with config.get, and return None where it is not yours."
            raise ConformanceError(f"with config {config}: {error}", "None", hint) from error
        if found is not None:
            raise ConformanceError(f"a spec for config {config}", "None", "Look at model_type before anything else.")
    return f"{len(STRANGERS)} configs of other types"


def check_spec_of_model(subject: Subject) -> str:
    """The spec agrees with the caches that the model makes, layer by layer."""
    try:
        checked = check_spec(subject.spec, subject.model)
    except BlockpoolError as error:
        needed = "a spec that says what make_cache and a forward pass show"
        raise ConformanceError(str(error).rstrip("."), needed, "Compare with mlx_blockpool_plugins.default.trace.") from error
    return ", ".join(f"{n} {kind}" for kind, n in Counter(layer.kind for layer in checked.layers).items())


def check_config(subject: Subject) -> str:
    """config.json alone gives the same spec, or an error that says the weights are needed."""
    needed = subject.spec
    try:
        found = subject.describe(None, copy.deepcopy(subject.config))
    except SpecError as error:
        return f"the model cannot be described without weights: {error}"
    except BlockpoolError as error:
        hint = "Return None, or raise SpecError, where config.json says too little."
        raise ConformanceError(f"with model=None: {error}", "the same spec", hint) from error
    if found is None:
        return "the model cannot be described without weights"
    if len(found.layers) != len(needed.layers):
        raise ConformanceError(
            f"{len(found.layers)} layers without the model and {len(needed.layers)} with it", "as many", "Read the right key."
        )
    for i, (without, given) in enumerate(zip(found.layers, needed.layers, strict=True)):
        if without != given:
            raise ConformanceError(f"{without} in layer {i} without the model", f"{given} as with it", "Describe both alike.")
    return "the same spec without the model"


def check_logits(subject: Subject) -> str:
    """A prefill in two parts, cut at any token, and decode steps on pooled caches give what mlx-lm's own give."""
    near = {size + d for size in (BLOCK_TOKENS, *subject.short_sizes) for d in (-1, 0, 1)}
    splits = sorted({1, 2, *near} - {0})
    tokens = subject.tokens(1, splits[-1] + 20)
    _check_weights(subject, tokens[:8])
    steps = [[token] for token in subject.tokens(2, STEPS)]
    gap = max(_as_stock(subject, [tokens[:at], tokens[at:], *steps], f"prompt in two parts, cut at {at}") for at in splits)
    return f"{len(tokens)} tokens cut at {', '.join(map(str, splits))}, {STEPS} steps; {exactly(gap)}"


def check_wrap(subject: Subject) -> str:
    """The same beyond the end of every window and chunk, in one part, in several and one by one."""
    if not subject.sizes:
        raise NotCheckedError("No layer has a window or a chunk.")
    if not subject.short_sizes:
        raise NotCheckedError(
            f"Windows and chunks of {subject.sizes} tokens; {MOST_TOKENS} at most are gone beyond. Lower them in the tiny model."
        )
    gap = 0.0
    for size in subject.short_sizes:
        tokens = subject.tokens(size, 3 * size + 40)
        around = [[token] for token in subject.tokens(3, min(size, LONG_DECODE) + 3)]
        most = max(2, size - 2)
        runs: dict[str, Parts] = {
            "one by one": [tokens[:most], *around],
            "in one part": [tokens[: 2 * size + 3], *around[:STEPS]],
            "part by part": [tokens[: size - 1], tokens[: size + 1], *around, tokens[:5], *around[:3], tokens[: 2 * size]],
        }
        parts = ((how, [p for p in run if p]) for how, run in runs.items())
        gap = max(gap, *(_as_stock(subject, run, f"beyond {size} tokens {how}") for how, run in parts))
    left = [size for size in subject.sizes if size not in subject.short_sizes]
    beside = f"; not beyond {left}, which are longer than {MOST_TOKENS}" if left else ""
    return f"beyond {', '.join(map(str, subject.short_sizes))} tokens; {exactly(gap)}{beside}"


def _as_stock(subject: Subject, parts: Parts, what: str) -> float:
    return same(cold(subject, parts), run(subject.model, pooled_caches(subject.arena()), parts), parts, what)


def _check_weights(subject: Subject, tokens: list[int]) -> None:
    other = [*tokens[:-2], tokens[-2] + 1, tokens[-1]]
    if max(distance(cold(subject, [tokens]), cold(subject, [other]))) <= TELLING:
        raise ConformanceError(
            "logits that do not depend on the token before the last",
            "weights in which a wrong key shows",
            "Make random ones: mlx_blockpool.testing.tiny_model(config).",
        )
