"""Every default, in one place. Sizes are bytes, times are seconds."""

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

# A max_tokens that never limits a reply: it may have as many tokens as fit.
WHAT_FITS = 1 << 40

DECODE_PATHS = ("auto", "ragged", "shared", "padded")


@dataclass(frozen=True)
class PoolConfig:
    """How the pool takes memory.

    pool_bytes:      hard limit for keys and values; None: half of the memory that the model leaves free.
    preallocate:     allocate the whole pool at the start instead of slab by slab.
    slabs:           an ordinary slab takes at most 1/slabs of the budget, ...
    slab_blocks:     ... and at most this many blocks. Larger slabs give longer runs, smaller ones are allocated later.
    max_tokens:      room that acquire() reserves behind a prompt in scripts that pass no other number.
    decode_path:     how a batch reads its keys and values; auto: by a measured rule (kv/decode_policy.py).
    state_bytes:     limit within pool_bytes for a hybrid model's states, running and cached; None: a quarter, ...
    states:          ... or up to half where a quarter would hold fewer than this many.
    pinned_share:    the fraction of the blocks, and of the states, that clients may pin with a TTL.
    agent_bytes:     limit for the prefixes that one agent has inserted; None: only pool_bytes limits them.
    anonymous_bytes: the same limit for all requests without an agent's name together.
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
    """How the engine divides its time and memory.

    prefill_tokens: prefill runs in chunks that end at multiples of this.
    prefill_rows:   the most short prompts in one chunk.
    decode_share:   the fraction of the time that decode gets while prompts wait for prefill; 0 to below 1.
    max_members:    the most requests that hold caches at a time.
    shared_tokens:  a shared prefix shorter than this is computed again instead of awaited.
    join_seconds:   requests that arrive within this time of each other start together.
    stall_seconds:  a server with work that computes nothing for this long reports itself unhealthy.
    wired_bytes:    what Metal keeps from being paged out while an engine runs; None: what the device recommends, as in mlx-lm;
                    0: the limit is left alone.
    stop_seconds:   how long a shutdown waits for a model that is being loaded.
    exit_seconds:   the process of a server that was asked to stop ends after this time, whatever hangs.
    end_seconds:    the process ends when its generation thread has hung for this long.
    max_positions:  the most tokens of a prompt and its reply; None: what the model's config.json says; 0: no limit.
    alone_tokens:   the longest reply for a request that mlx-lm serves by itself and that names no max_tokens: room for the whole
                    reply is reserved at its start.
    endless_tokens: the same limit where neither the pool nor the model has one.
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
    store_bytes:     hard limit for all records, quarantined ones included. Each further server on the same folder can exceed it
                     by 2 look_bytes.
    bits:            8 or 4: records are quantised; None: they hold what memory holds.
    queue_bytes:     the most bytes that wait for the writer; what exceeds it stays in memory only.
    step_bytes:      the most bytes copied out of the pool between two steps.
    min_free_bytes:  free space that is left on the file system.
    daily_bytes:     the most bytes written in a day; None: no limit.
    idle_seconds:    after this time without a request, the partial blocks at the ends of conversations are written too.
    flush_seconds:   how long a shutdown waits for the writer.
    retry_seconds:   how long a disk that failed is left alone.
    answer_seconds:  a read that returns nothing for this long counts as failed, and the prompt is computed instead.
    look_bytes:      a server scans for records of other servers after it has written this much; None: a 32nd of store_bytes.
    look_seconds:    it also scans after this time, if it has written or used anything.
    model_bytes:     the most bytes of one model's records; None: all of store_bytes.
    quarantine:      the fraction of store_bytes that bad files may take; the oldest are removed first.
    agents:          how many unpinned notes of named agents are kept; those used longest ago are removed first.
    conversations:   the same for conversations that are recognised by their beginning.
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
    """Which models are loaded, and when they are swapped.

    max_models:        the most models loaded at a time; the pool's bytes are divided between them.
    patience_seconds:  how long requests for loaded models may overtake others before a swap is forced.
    drain_seconds:     the model that is swapped out goes once it is idle, or after the longer of patience_seconds and this:
                       its running replies continue when it is loaded again.
    wait_seconds:      a request fails whose model could not be loaded within this time.
    linger_seconds:    an idle model stays loaded, while others wait, for as long as the last swap took but no longer than this:
                       an agent that has just received its reply soon sends the next request.
    idle_seconds:      a model without requests for this long is unloaded; None: never.
    allowed:           the models that may be loaded beside the default one, or folders of models; None: every downloaded model.
    downloads:         whether a request may cause a download.
    download_seconds:  the hub has to answer within this time.
    aliases:           other names of models as (name, model); None: an unknown name means the default
                       model where that alone is served.
    build_seconds:     a model whose layers cannot be built within this time is rejected.
    retry_seconds:     how long a model is not tried again that could not be loaded although its files are right.
    piece_bytes:       weights are read in pieces of this size; other loaded models run in between.
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
    """How worker processes render and tokenize prompts.

    small_bytes:     jobs of at most this size have a worker of their own, ...
    small_seconds:   ... and move to the large jobs after this time.
    large_workers:   how many large jobs run at a time.
    seconds:         processor time for one prompt, ...
    load_seconds:    ... beside the processor time for loading its tokenizer.
    memory_bytes:    what a job may allocate beyond what a fresh worker has.
    template_kwargs: what requests may pass to templates beside the known switches; None: anything.
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
    """The most of each kind in one request."""

    messages: int = 10_000
    tools: int = 1_000
    logit_bias: int = 4_096
    stop_words: int = 64
    stop_characters: int = 256


@dataclass(frozen=True)
class ImageConfig:
    """Images in requests, for models that take them.

    hosts:       hosts from which images may be fetched; other images have to be data URLs.
    most:        the most images in one request.
    image_bytes, pixels: of one image.
    seconds:     for fetching all images of a request.
    characters:  of text in a request with images, which the generation thread renders.
    """

    hosts: tuple[str, ...] = ()
    most: int = 20
    image_bytes: int = 20 << 20
    pixels: int = 50_000_000
    seconds: float = 20.0
    characters: int = 400_000


@dataclass(frozen=True)
class GuardConfig:
    """Which requests the server admits, and with which limits.

    host:             the address that it listens on.
    api_key:          the key that a request has to carry; None: none.
    api_keys:         several keys as (name, key). What a request leaves behind belongs to the name of its key, ...
    private_prefixes: ... and so do the prefixes that it has computed.
    allow_remote:     whether other machines may connect without a key.
    allowed_hosts:    accepted names in Host headers, beside those of this machine.
    allowed_origins:  origins of pages that may send requests; empty: mlx-lm's endpoints are open to all of them, ours to pages of
                      this machine.
    max_body_bytes, max_headers, max_header_bytes: of one request.
    bodies:           the bodies in memory take at most as much as this many of the largest.
    max_connections:  connections served at a time; as many more may be open between two requests.
    backlog:          connections that may wait to be accepted.
    keep_alive_seconds: an idle connection is closed after this time.
    stall_seconds:    a request that sends nothing for this long is dropped, ...
    request_seconds:  ... and so is one that is incomplete after this time.
    send_seconds:     a client that reads nothing of its response for this long is dropped.
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
