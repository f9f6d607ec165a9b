"""The checks of a provider's spec, of pooled caches and of cached prefixes.

Each takes a Subject and returns a description of what it checked. Raises ConformanceError, or
NotCheckedError if the check does not apply.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..config import KVBits, PoolConfig, StoreConfig
from ..errors import BlockpoolError, SpecError
from ..kv.attach import detach
from ..kv.build import open_served
from ..kv.capabilities import Capabilities
from ..kv.prompt_cache import pooled_caches
from ..kv.proof import MOST_TOKENS, Parts, cut, distance, run
from ..plugins import check_spec
from ..spec import BLOCK_TOKENS, WindowLayer
from ..store.prompt_store import PromptStore
from ..tier.cache import TieredPrefixCache
from .runs import allowed, cold, exactly, same
from .subject import ConformanceError, NotCheckedError, Subject

STRANGERS: tuple[dict[str, Any], ...] = (
    {},
    {"model_type": "of_somebody_else"},
    {"model_type": "of_somebody_else", "text_config": {"model_type": "llama"}},
)
STEPS = 6
# Decoding once around a long window would take too long.
LONG_DECODE = 70
# With weights under which another token changes less than this fraction of the largest logit,
# anything would pass.
TELLING = 1e-3
HINT = (
    "A layer whose spec is correct may have a cache class that stores more than its arrays; "
    "describe it with another kind."
)
BITS = KVBits()
REPLY_TOKENS = 16
IN_BATCHES = {
    True: "several sequences in one step, whose blocks are read in place",
    False: "one sequence at a time, because the model's batches are wrong",
}


def check_provider(subject: Subject) -> str:
    """The provider describes the model and does not modify its config."""
    config = copy.deepcopy(subject.config)
    try:
        found = subject.spec
        subject.describe(subject.model, config)
    except SpecError as error:
        raise ConformanceError(
            f"SpecError: {error}", "a spec of the loaded model", "Read its shapes from `model`."
        ) from error
    except BlockpoolError as error:
        raise ConformanceError(str(error), "a ModelCacheSpec", "Fix the hook.") from error
    if config != subject.config:
        keys = sorted(
            k for k in {*config, *subject.config} if config.get(k) != subject.config.get(k)
        )
        raise ConformanceError(
            f"a config with other {', '.join(keys)} afterwards",
            "an unchanged config",
            "Copy it before writing.",
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
            hint = "Check model_type first, with config.get, and return None if it is not yours."
            raise ConformanceError(f"with config {config}: {error}", "None", hint) from error
        if found is not None:
            raise ConformanceError(
                f"a spec for config {config}", "None", "Check model_type before anything else."
            )
    return f"{len(STRANGERS)} configs of other types"


def check_spec_of_model(subject: Subject) -> str:
    """The spec agrees with the caches that the model makes, layer by layer."""
    try:
        checked = check_spec(subject.spec, subject.model)
    except SpecError as error:
        raise NotCheckedError(f"{error} The other checks prove what the plugin says.") from error
    except BlockpoolError as error:
        needed = "a spec that says what make_cache and a forward pass show"
        raise ConformanceError(
            str(error).rstrip("."), needed, "Compare with mlx_blockpool_plugins.default.trace."
        ) from error
    return ", ".join(
        f"{n} {kind}" for kind, n in Counter(layer.kind for layer in checked.layers).items()
    )


def check_config(subject: Subject) -> str:
    """config.json alone gives the same spec, or an error that says the weights are needed."""
    needed = subject.spec
    try:
        found = subject.describe(None, copy.deepcopy(subject.config))
    except SpecError as error:
        return f"the model cannot be described without weights: {error}"
    except BlockpoolError as error:
        hint = "Return None, or raise SpecError, if config.json is not enough."
        raise ConformanceError(f"with model=None: {error}", "the same spec", hint) from error
    if found is None:
        return "the model cannot be described without weights"
    if len(found.layers) != len(needed.layers):
        raise ConformanceError(
            f"{len(found.layers)} layers without the model and {len(needed.layers)} with it",
            "the same",
            "Read the right key.",
        )
    for i, (without, given) in enumerate(zip(found.layers, needed.layers, strict=True)):
        if without != given:
            raise ConformanceError(
                f"{without} in layer {i} without the model",
                f"{given} as with it",
                "Describe both alike.",
            )
    return "the same spec without the model"


def check_logits(subject: Subject) -> str:
    """A prefill in two parts, cut at any token, and decode steps on pooled caches give what
    mlx-lm's own give.
    """
    near = {size + d for size in (BLOCK_TOKENS, *subject.short_sizes) for d in (-1, 0, 1)}
    splits = sorted({1, 2, *near} - {0})
    tokens = subject.tokens(1, splits[-1] + 20)
    _check_weights(subject, tokens[:8])
    steps = [[token] for token in subject.tokens(2, STEPS)]
    gap = max(
        _as_stock(subject, [tokens[:at], tokens[at:], *steps], f"prompt in two parts, cut at {at}")
        for at in splits
    )
    return (
        f"{len(tokens)} tokens cut at {', '.join(map(str, splits))}, {STEPS} steps; {exactly(gap)}"
    )


def check_wrap(subject: Subject) -> str:
    """The same beyond the end of every window and chunk, in one part, in several and one by one."""
    if not subject.sizes:
        raise NotCheckedError("No layer has a window or a chunk.")
    if not subject.short_sizes:
        raise NotCheckedError(
            f"Windows and chunks of {subject.sizes} tokens; at most {MOST_TOKENS} can be checked. "
            "Lower them in the tiny model."
        )
    gap = 0.0
    for size in subject.short_sizes:
        tokens = subject.tokens(size, 3 * size + 40)
        around = [[token] for token in subject.tokens(3, min(size, LONG_DECODE) + 3)]
        most = max(2, size - 2)
        runs: dict[str, Parts] = {
            "one by one": [tokens[:most], *around],
            "in one part": [tokens[: 2 * size + 3], *around[:STEPS]],
            "part by part": [
                tokens[: size - 1],
                tokens[: size + 1],
                *around,
                tokens[:5],
                *around[:3],
                tokens[: 2 * size],
            ],
        }
        parts = ((how, [p for p in run if p]) for how, run in runs.items())
        gap = max(
            gap, *(_as_stock(subject, run, f"beyond {size} tokens {how}") for how, run in parts)
        )
    left = [size for size in subject.sizes if size not in subject.short_sizes]
    unchecked = f"; not beyond {left}, which are longer than {MOST_TOKENS}" if left else ""
    return f"beyond {', '.join(map(str, subject.short_sizes))} tokens; {exactly(gap)}{unchecked}"


def _as_stock(subject: Subject, parts: Parts, what: str) -> float:
    return same(
        cold(subject, parts), run(subject.model, pooled_caches(subject.arena()), parts), parts, what
    )


def _check_weights(subject: Subject, tokens: list[int]) -> None:
    other = [*tokens[:-2], tokens[-2] + 1, tokens[-1]]
    if max(distance(cold(subject, [tokens]), cold(subject, [other]))) <= TELLING:
        raise ConformanceError(
            "logits that do not depend on the token before the last",
            "weights in which a wrong key shows",
            "Make random ones: mlx_blockpool.testing.tiny_model(config).",
        )


def check_warm(subject: Subject) -> str:
    """A prompt that extends a cached one resumes at its end, with the logits of a cold run."""
    prefix, system, tokens = (
        TieredPrefixCache(subject.arena()),
        _system(subject),
        _conversation(subject),
    )
    gap = _serve(subject, prefix, tokens, 0, [system])
    forked = [*tokens[: system + 10], *subject.tokens(12, 7)]
    gap = max(gap, _serve(subject, prefix, forked, system))
    gap = max(gap, _serve(subject, prefix, _longer(subject), len(tokens)))
    return f"resumed at {len(tokens)} tokens; {exactly(gap)}"


def check_restart(subject: Subject) -> str:
    """A prefix that was written to disk is resumed after a restart as before it, with the logits
    of a cold run.
    """
    if any(isinstance(leaf, WindowLayer) and leaf.keep for leaf in subject.spec.leaves):
        raise NotCheckedError("Windows that keep their first tokens are not written to disk.")
    with TemporaryDirectory(prefix="mlx-blockpool-conformance-") as folder:
        before = _on_disk(subject, folder)
        _serve(subject, before, _conversation(subject), 0, [_system(subject)])
        before.close()
        longer = _longer(subject)
        hit = before.acquire(longer, REPLY_TOKENS).lookup.hit
        after = _on_disk(subject, folder)
        gap = _serve(subject, after, longer, hit)
        after.close()
    return f"resumed at {hit} tokens; {exactly(gap)}"


def check_batch(subject: Subject) -> str:
    """What the proof at load finds: whether several sequences run in one step."""
    return IN_BATCHES[_proven(subject, None).ragged]


def check_quantised(subject: Subject) -> str:
    """The same with blocks in 8 bits, if the model's attention reads them."""
    if subject.spec.with_bits(BITS).bits is None:
        raise NotCheckedError(
            "No keys or values have a size that is a multiple of 32: blocks store them unquantised."
        )
    return IN_BATCHES[_proven(subject, BITS).ragged]


def _proven(subject: Subject, bits: KVBits | None) -> Capabilities:
    """What the model can do with a pool, as the server finds out when it loads the model."""
    arena = open_served(subject.model, subject.spec, subject.pool_bytes, PoolConfig(bits=bits))
    detach(subject.model)
    if arena.spec.bits != bits:
        raise NotCheckedError(
            "The model's attention does not read quantised blocks: the server stores its keys and "
            "values unquantised."
        )
    return arena.capabilities


def _on_disk(subject: Subject, folder: str) -> TieredPrefixCache:
    config = StoreConfig(folder=Path(folder), min_free_bytes=0)
    return TieredPrefixCache(
        subject.arena(), store=PromptStore(config, "conformance", {"model_id": subject.model_id})
    )


def _system(subject: Subject) -> int:
    """The length of a prompt's first part, which is cached by itself: more than a block and than
    each short window.
    """
    return max([BLOCK_TOKENS, *subject.short_sizes]) + 14


def _conversation(subject: Subject) -> list[int]:
    return subject.tokens(11, _system(subject) + 30)


def _longer(subject: Subject) -> list[int]:
    return [*_conversation(subject), *subject.tokens(13, 9)]


def _serve(
    subject: Subject,
    prefix: TieredPrefixCache,
    tokens: list[int],
    least_hit: int,
    places: Sequence[int] = (),
) -> float:
    """Resume a prompt from its longest cached prefix, and insert it at `places` and at its end.

    Returns the largest difference from the logits of a cold run in the same parts. Raises
    ConformanceError.
    """
    acquired = prefix.acquire(tokens, REPLY_TOKENS)
    hit = done = acquired.lookup.hit
    if hit < least_hit:
        raise ConformanceError(
            f"a prompt of {len(tokens)} tokens resumed at {hit}",
            f"{least_hit}, which are cached",
            HINT,
        )
    # What a state has lost shows most in the first token.
    parts = cut(tokens, [hit, hit + 1, *places])
    computed = parts[1:] if hit else parts
    found = []
    for part in computed:
        found += run(subject.model, acquired.caches, [part])
        done += len(part)
        if done in places:
            prefix.insert(tokens[:done], acquired.caches, "system")
    prefix.release(tokens, acquired.caches)
    prefix.check()
    needed = cold(subject, parts)[-len(computed) :]
    served = [tokens[: hit + len(computed[0])], *computed[1:]]
    return same(needed, found, served, f"resumed at {hit}", allowed(subject, parts))
