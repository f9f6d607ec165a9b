"""Every default, in one place."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from .errors import BlockpoolError

_UNITS = {"": 1, "B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGT", 1)
    for suffix, base in (("", 1000), ("B", 1000), ("IB", 1024))
}

# A max_tokens that bounds nothing: the reply may have as many tokens as fit.
WHAT_FITS = 1 << 40

DECODE_PATHS = ("auto", "ragged", "shared", "padded")


@dataclass(frozen=True)
class PoolConfig:
    """How the pool takes memory.

    pool_bytes:   hard limit for keys and values, in bytes; None: half of the memory that the model leaves free.
    preallocate:  take all of it at the start instead of slab by slab.
    slabs:        an ordinary slab is at most this part of the budget, ...
    slab_blocks:  ... and at most this many blocks; larger ones make longer runs, smaller ones take memory later.
    max_tokens:   room that a fetch in a script reserves after the prompt unless told otherwise.
    decode_path:  how a batch reads its keys and values; auto: by a measured rule (cache/paths.py).
    state_bytes:  what a hybrid model's states, running and kept, may take of pool_bytes; None: a quarter, ...
    states:       ... or up to half of it where a quarter would hold fewer than this many.
    pinned_share: what clients have marked to be kept for a time is at most this part of the blocks, and of the states.
    agent_bytes:  what the prefixes that one agent has brought in may take; None: no limit but pool_bytes.
    anonymous_bytes: the same for all requests together that name no agent.
    """

    pool_bytes: int | None = None
    preallocate: bool = False
    slabs: int = 4
    slab_blocks: int = 64
    max_tokens: int = 512
    decode_path: str = "auto"
    state_bytes: int | None = None
    states: int = 16
    pinned_share: float = 0.5
    agent_bytes: int | None = None
    anonymous_bytes: int | None = None


@dataclass(frozen=True)
class EngineConfig:
    """How the engine shares its time and memory.

    prefill_tokens: a prefill is computed in chunks that end at multiples of this.
    prefill_rows:   at most this many short prompts go into one chunk.
    decode_share:   part of the time that decode gets while prompts wait for their prefill, 0 to below 1.
    max_members:    at most this many requests have caches at a time.
    shared_tokens:  fewer tokens than these are computed again rather than waited for.
    join_seconds:   requests that arrive within this time of each other start together.
    stall_seconds:  a server that has work and computes nothing for so long is not healthy.
    wired_bytes:    what Metal may keep from being paged out while an engine runs; None: what the device recommends, as mlx-lm
                    does, 0: its limit is left alone.
    stop_seconds:   how long a server that is to end waits for a model that is being loaded.
    exit_seconds:   the process of a server that was asked to stop has ended after so long, whatever hangs.
    end_seconds:    the process of a server whose thread hangs for so long ends.
    max_positions:  the most tokens of a prompt and its reply; None: what the model's config.json says, 0: no limit.
    alone_tokens:   the most tokens of a reply that mlx-lm serves by itself and whose client names no limit: room for all of
                    them is reserved at its start.
    endless_tokens: the same where neither the pool nor the model has a limit.
    """

    prefill_tokens: int = 512
    prefill_rows: int = 8
    decode_share: float = 0.5
    max_members: int = 32
    shared_tokens: int = 64
    join_seconds: float = 0.01
    stall_seconds: float = 120.0
    wired_bytes: int | None = None
    stop_seconds: float = 3.0
    exit_seconds: float = 4.0
    end_seconds: float = 240.0
    max_positions: int | None = None
    alone_tokens: int = 4096
    endless_tokens: int = 32768


@dataclass(frozen=True)
class StoreConfig:
    """The prompt store on disk.

    folder:          None: the user's cache folder.
    store_bytes:     hard limit for all records and bad ones in quarantine. Each server beside the first on a folder can exceed it
                     by 2 look_bytes.
    bits:            8 or 4: quantise on disk; None: as it is in memory.
    queue_bytes:     at most so much waits to be written; what is more stays in memory only.
    step_bytes:      at most so much is copied out of the pool between two steps.
    min_free_bytes:  what the file system keeps free.
    daily_bytes:     at most so much is written in a day; None: no limit.
    idle_seconds:    once nothing was asked for so long, the partial blocks at the ends of conversations are written too.
    flush_seconds:   how long a shutdown waits for what is not written yet.
    retry_seconds:   how long a disk that failed is left alone.
    answer_seconds:  a disk that gives none of what is read for so long counts as failed, and prompts are computed instead.
    look_bytes:      after so much written a server looks at what others have written there; None: a 32nd of store_bytes.
    look_seconds:    after so long at the latest, if it has written or used anything.
    model_bytes:     the most of store_bytes that the records of one model may take; None: all of it.
    quarantine:      at most this part of store_bytes are bad files that are kept to be looked at; the oldest go.
    agents:          so many notes of agents that clients have named are kept, beside pinned ones; those used longest ago go.
    conversations:   the same for those that were known by how they begin.
    """

    folder: Path | None = None
    store_bytes: int = 20 * 10**9
    bits: int | None = None
    queue_bytes: int = 256 * 10**6
    step_bytes: int = 32 * 10**6
    min_free_bytes: int = 2 * 10**9
    daily_bytes: int | None = None
    idle_seconds: float = 60.0
    flush_seconds: float = 3.0
    retry_seconds: float = 30.0
    answer_seconds: float = 5.0
    look_bytes: int | None = None
    look_seconds: float = 60.0
    model_bytes: int | None = None
    quarantine: float = 0.05
    agents: int = 2000
    conversations: int = 200

    @property
    def quarantine_bytes(self) -> int:
        """The most for bad files."""
        return int(self.store_bytes * self.quarantine)

    @property
    def own_bytes(self) -> int:
        """The most for the records of one model."""
        return self.store_bytes if self.model_bytes is None else min(self.model_bytes, self.store_bytes)


@dataclass(frozen=True)
class ModelsConfig:
    """Which models are loaded, and when they change.

    max_models:        at most so many are loaded at a time; the pool's bytes are divided between them.
    patience_seconds:  requests of loaded models pass those of another for so long; then one of the loaded has to go.
    drain_seconds:     ... as soon as it has nothing to do, and after the patience again, or at least after so long, in any case:
                       replies that still run go on once their model is there again.
    wait_seconds:      a request whose model could not be loaded for so long fails.
    linger_seconds:    a model with nothing to do is kept from those that wait for another as long as the last change took, but no
                       longer than this: an agent that has its answer soon asks again.
    idle_seconds:      a model that nobody asked for so long is unloaded; None: never.
    allowed:           beside the default model only these are loaded, and what is in them where they are folders of models;
                       None: whatever is downloaded.
    downloads:         a request may have a model downloaded.
    download_seconds:  the hub has to answer within this time.
    aliases:           other names of models, (name, model) each; None: names that nobody knows are those of the default model
                       where it alone is served.
    build_seconds:     a model whose layers cannot be set up within this time is refused.
    retry_seconds:     a model that could not be loaded though its files were right is not tried again for so long.
    piece_bytes:       weights are read in pieces of this size, between which other loaded models go on.
    """

    max_models: int = 1
    patience_seconds: float = 30.0
    drain_seconds: float = 1.0
    wait_seconds: float = 600.0
    linger_seconds: float = 2.0
    idle_seconds: float | None = None
    allowed: tuple[str, ...] | None = None
    downloads: bool = False
    download_seconds: float = 5.0
    aliases: tuple[tuple[str, str], ...] | None = None
    build_seconds: float = 20.0
    retry_seconds: float = 30.0
    piece_bytes: int = 256 * 10**6


@dataclass(frozen=True)
class PromptConfig:
    """How prompts are rendered and tokenized, in worker processes.

    small_bytes:    jobs of at most so many bytes have a worker of their own, ...
    small_seconds:  ... and are one of the large jobs once they have taken so long.
    large_workers:  so many large jobs are computed at a time.
    seconds:        a prompt may take so long, ...
    load_seconds:   ... beside the time for loading its tokenizer. Both are seconds of the processor.
    memory_bytes:   what a job may take beside what a fresh worker has.
    template_kwargs: what requests may give to templates beside the known switches; None: anything.
    """

    small_bytes: int = 128 << 10
    small_seconds: float = 2.0
    large_workers: int = 2
    seconds: float = 20.0
    load_seconds: float = 60.0
    memory_bytes: int = 3 << 30
    template_kwargs: tuple[str, ...] | None = ()


@dataclass(frozen=True)
class RequestConfig:
    """How much of everything one request may have."""

    messages: int = 10_000
    tools: int = 1_000
    logit_bias: int = 4_096
    stop_words: int = 64
    stop_characters: int = 256


@dataclass(frozen=True)
class ImageConfig:
    """Images of requests, for models that take them.

    hosts:       from where they may be fetched; of others only data URLs are taken.
    most:        in one request.
    image_bytes, pixels: of one image.
    seconds:     for fetching all of a request.
    characters:  of text in a request with images, whose prompt the generation thread renders.
    """

    hosts: tuple[str, ...] = ()
    most: int = 20
    image_bytes: int = 20 << 20
    pixels: int = 50_000_000
    seconds: float = 20.0
    characters: int = 400_000


@dataclass(frozen=True)
class GuardConfig:
    """Whom the server lets in, and with what.

    host:             the address that it listens on.
    api_key:          what a request has to show; None: nothing.
    api_keys:         the same by several names: (name, key) of each. What requests with a key leave behind is for its name, ...
    private_prefixes: ... and the prefixes that they have computed too.
    allow_remote:     other machines may ask without a key.
    allowed_hosts:    names in Host headers beside those of this machine.
    allowed_origins:  pages that may ask; empty: what mlx-lm has is for all, what it has not for pages of this machine.
    max_body_bytes, max_headers, max_header_bytes: of one request.
    bodies:           all bodies that are in memory at a time are at most as large as so many of the largest.
    max_connections:  that are served at a time; as many more may be open between two requests.
    backlog:          connections that may wait to be accepted.
    keep_alive_seconds: a connection without a request is closed after so long.
    stall_seconds:    a request of which nothing has come for so long is dropped, ...
    request_seconds:  ... and one that is not whole after so long.
    send_seconds:     a client that takes nothing of its answer for so long is left.
    """

    host: str = "127.0.0.1"
    api_key: str | None = field(default=None, repr=False)
    api_keys: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    private_prefixes: bool = False
    allow_remote: bool = False
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    max_body_bytes: int = 16 << 20
    bodies: int = 32
    max_headers: int = 100
    max_header_bytes: int = 64 << 10
    max_connections: int = 256
    backlog: int = 1024
    keep_alive_seconds: float = 60.0
    stall_seconds: float = 30.0
    request_seconds: float = 120.0
    send_seconds: float = 60.0


def parse_seconds(text: str) -> float:
    """'30s', '15m', '2h' or '90' in seconds. Raises BlockpoolError on anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d*)?)\s*([smh]?)", text.strip().lower())
    if found is None:
        raise BlockpoolError(f"Found time {text!r}; needed a number with a unit, such as 30s, 15m or 2h.")
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]]


def parse_bytes(text: str) -> int:
    """'4GB', '512 MiB' or '1000' in bytes. Raises BlockpoolError on anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d*)?)\s*([A-Z]*)", text.strip().upper())
    if found is None or found[2] not in _UNITS:
        raise BlockpoolError(f"Found size {text!r}; needed a number with a unit, such as 4GB or 512MiB.")
    return int(float(found[1]) * _UNITS[found[2]])
