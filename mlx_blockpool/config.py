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

DECODE_PATHS = ("auto", "ragged", "shared", "padded", "kernel")

KV_BITS = (8, 4)
GROUP_SIZES = (32, 64, 128)


@dataclass(frozen=True)
class KVBits:
    """In how many bits blocks hold keys and values, in mlx's quantised form; None: as the model computes them."""

    keys: int | None = 8
    values: int | None = 8
    group_size: int = 64  # as many values share a scale and a bias

    def __post_init__(self) -> None:
        for name, bits in (("Keys", self.keys), ("Values", self.values)):
            if bits is not None and bits not in KV_BITS:
                raise BlockpoolError(f"{name} cannot be held in {bits!r} bits. Choose one of {_listed(KV_BITS)}.")
        if self.group_size not in GROUP_SIZES:
            raise BlockpoolError(f"Groups cannot have {self.group_size!r} values. Choose one of {_listed(GROUP_SIZES)}.")

    def __str__(self) -> str:
        if self.keys == self.values:
            return f"{self.keys}-bit keys and values"
        return " and ".join(f"{bits}-bit {of}" for bits, of in ((self.keys, "keys"), (self.values, "values")) if bits is not None)

    @property
    def options(self) -> str:
        """The options of a command that choose these bits."""
        both = ((self.keys, "-keys"), (self.values, "-values")) if self.keys != self.values else ((self.keys, ""),)
        size = [] if self.group_size == KVBits.group_size else [f"--kv-group-size {self.group_size}"]
        return " ".join([f"--kv-bits{which} {own}" for own, which in both if own is not None] + size)


@dataclass(frozen=True)
class PoolConfig:
    """How the pool takes memory."""

    pool_bytes: int | None = None  # hard limit for keys and values; None: half of the memory that the model leaves free
    preallocate: bool = False  # allocate the whole pool at the start instead of slab by slab
    slabs: int = 4  # an ordinary slab takes at most 1/slabs of the budget, ...
    slab_blocks: int = 64  # ... and at most this many blocks. Larger slabs give longer runs, smaller ones are allocated later
    max_tokens: int = 512  # room that acquire() reserves after a prompt in scripts that pass no other number
    decode_path: str = (
        "auto"  # how a batch reads keys and values; auto: by what each path costs where that was measured, else ragged
    )
    bits: KVBits | None = None  # how blocks hold keys and values; None: as the model computes them
    state_bytes: int | None = None  # limit in pool_bytes for a hybrid model's states, running and cached; None: a quarter, ...
    states: int = 16  # ... or up to half if a quarter would hold fewer than this many
    pinned_share: float = 0.5  # the fraction of the blocks, and of the states, that clients may pin with a TTL
    agent_bytes: int | None = None  # limit for the prefixes that one agent has inserted; None: only pool_bytes limits them
    anonymous_bytes: int | None = None  # the same limit for all requests without an agent's name together


@dataclass(frozen=True)
class EngineConfig:
    """How the engine divides its time and memory, and when a server that does not get on ends."""

    prefill_tokens: int = 512  # prefill runs in chunks that end at multiples of this
    prefill_rows: int = 8  # the most short prompts in one chunk
    decode_share: float = 0.5  # the fraction of the time for decode while prompts wait for prefill; 0 to below 1
    max_members: int = 32  # the most requests that hold caches at a time
    shared_tokens: int = 64  # a shared prefix shorter than this is computed again instead of awaited
    forced_tokens: int = 4  # a run of at least so many tokens that a form forces is appended at once instead of one by one
    measures: bool = False  # whether the speed of a model is measured when it is loaded, unless the prompt store's folder has it
    # How many tokens are drafted for a request in a step. auto: as many as pay by what forwards cost on this device; off: none; a
    # number: up to so many, whatever they cost.
    drafts: str | int = "auto"
    most_drafted: int = 16  # the most tokens that are drafted for a request in a step
    join_seconds: float = 0.01  # requests that arrive within this time of each other start together
    stall_seconds: float = 120.0  # a server with work that computes nothing for this long reports itself unhealthy
    # Metal keeps these bytes from being paged out while an engine runs; None: what the device recommends, as in mlx-lm; 0: the
    # limit is left alone.
    wired_bytes: int | None = None
    stop_seconds: float = 3.0  # how long a shutdown waits for a model that is being loaded
    exit_seconds: float = 4.0  # the process of a server that is to stop ends after this time, whatever hangs
    end_seconds: float = 240.0  # the process ends when its generation thread has hung for this long
    max_positions: int | None = None  # of a prompt and its reply; None: by the model's config.json; 0: no limit
    # The longest reply for a request that mlx-lm serves by itself and that names no max_tokens: room for all of it is reserved at
    # its start.
    alone_tokens: int = 4096
    endless_tokens: int = 32768  # the same limit if neither the pool nor the model has one

    def __post_init__(self) -> None:
        if self.drafts not in ("auto", "off") and not (isinstance(self.drafts, int) and self.drafts > 0):
            raise BlockpoolError(f"Drafts of {self.drafts!r} tokens are not possible. Choose auto, off or a number from 1 on.")


@dataclass(frozen=True)
class StoreConfig:
    """The prompt store on disk."""

    folder: Path | None = None  # None: the user's cache folder
    # Hard limit for all records, quarantined ones included. Each further server on the folder can exceed it by 2 look_bytes.
    store_bytes: int = 20 * 10**9
    bits: int | None = None  # 8 or 4: records are quantised; None: they hold what memory holds
    queue_bytes: int = 256 * 10**6  # the most bytes that wait for the writer; what exceeds it stays in memory only
    step_bytes: int = 32 * 10**6  # the most bytes copied out of the pool between two steps
    min_free_bytes: int = 2 * 10**9  # free space that is left on the file system
    daily_bytes: int | None = None  # the most bytes written in a day; None: no limit
    idle_seconds: float = 60.0  # after this time without a request, the ends of conversations are written in partial blocks
    flush_seconds: float = 3.0  # how long a shutdown waits for the writer
    retry_seconds: float = 30.0  # how long a disk that failed is left alone
    answer_seconds: float = 5.0  # a read without a result for this long counts as failed, and the prompt is computed instead
    look_bytes: int | None = None  # after writing this much, a server scans for records of others; None: store_bytes / 32
    look_seconds: float = 60.0  # it also scans after this time, if it has written or used anything
    model_bytes: int | None = None  # the most bytes of one model's records; None: all of store_bytes
    quarantine: float = 0.05  # the fraction of store_bytes that bad files may take; the oldest are removed first
    agents: int = 2000  # unpinned notes of named agents that are kept; the least recently used are removed first
    conversations: int = 200  # the same for conversations that are recognised by their beginning

    @property
    def quarantine_bytes(self) -> int:
        return int(self.store_bytes * self.quarantine)

    @property
    def own_bytes(self) -> int:
        """The most bytes of the records of one model."""
        return self.store_bytes if self.model_bytes is None else min(self.model_bytes, self.store_bytes)


@dataclass(frozen=True)
class ModelsConfig:
    """Which models are loaded, and when they are swapped."""

    max_models: int = 1  # loaded at a time; the pool's bytes are divided between them
    patience_seconds: float = 30.0  # how long requests for loaded models may overtake others before a swap is forced
    # A model is unloaded for another once it is idle, or after the longer of patience_seconds and this: its running replies
    # continue when it is loaded again.
    drain_seconds: float = 1.0
    wait_seconds: float = 600.0  # a request fails if its model could not be loaded within this time
    # While others wait, an idle model stays loaded for as long as the last swap took, but no longer than this: an agent that has
    # just received its reply soon sends the next request.
    linger_seconds: float = 2.0
    idle_seconds: float | None = None  # a model without requests for this long is unloaded; None: never
    allowed: tuple[str, ...] | None = None  # models, or folders of models, beside the default; None: every downloaded model
    downloads: bool = False  # whether a request may cause a download
    download_seconds: float = 5.0  # the hub has to answer within this time
    # Other names of models as (name, model); None: unknown names mean the default model, if only that is served.
    aliases: tuple[tuple[str, str], ...] | None = None
    build_seconds: float = 20.0  # a model whose layers cannot be built within this time is rejected
    retry_seconds: float = 30.0  # how long a model with correct files that could not be loaded is not tried again
    piece_bytes: int = 256 * 10**6  # weights are read in pieces of this size; other loaded models run in between


@dataclass(frozen=True)
class PromptConfig:
    """How worker processes render and tokenize prompts."""

    small_bytes: int = 128 << 10  # jobs of at most this size have a worker of their own, ...
    small_seconds: float = 2.0  # ... and move to the large jobs after this time
    large_workers: int = 2  # how many large jobs run at a time
    seconds: float = 20.0  # processor time for one prompt, ...
    load_seconds: float = 60.0  # ... beside the processor time for loading its tokenizer
    memory_bytes: int = 3 << 30  # what a job may allocate beyond what a fresh worker has
    template_kwargs: tuple[str, ...] | None = ()  # what requests may pass to templates beside the known switches; None: anything


@dataclass(frozen=True)
class RequestConfig:
    """The most of each kind in one request."""

    messages: int = 10_000
    tools: int = 1_000
    logit_bias: int = 4_096
    stop_words: int = 64
    stop_characters: int = 256
    salt_characters: int = 1_024
    choices: int = 32
    top_logprobs: int = 20
    prediction_characters: int = 1 << 18


@dataclass(frozen=True)
class FormConfig:
    """What the form of one reply may take, and what the server keeps of forms."""

    schema_bytes: int = 256 << 10  # of one schema as JSON
    text_bytes: int = 64 << 10  # of one regular expression or grammar
    values: int = 20_000  # in one schema
    depth: int = 64  # of one schema
    enum_values: int = 10_000  # of one enum
    properties: int = 2_000  # of one object, ...
    optional_properties: int = 400  # ... and those of them that may be left out
    # llguidance's limits: of what it builds of a grammar, and of what one mask may cost. The worst masks take 10 ms and 40 MB.
    grammar_symbols: int = 200_000
    initial_fuel: int = 1_000_000
    step_fuel: int = 100_000
    step_items: int = 30_000
    row_items: int = 2_000
    # All replies in a grammar share its states, of up to 4 KB each: it is compiled anew after so many replies.
    # They bound what a text of one value may force in a step too, which takes a millisecond for each thousand.
    lexer_states: int = 20_000
    replies: int = 1_000
    compile_seconds: float = 1.0  # processor time for compiling one grammar
    compiled: int = 128  # grammars that stay compiled, ...
    compiled_bytes: int = 8 << 20  # ... of at most so many bytes of text, ...
    # ... and so much processor time of compiling, which leaves up to 430 MB a second; the least recently used are dropped first.
    kept_seconds: float = 0.5
    # Replies add up to 260 MB for each second that their forms take: behind so many, all are dropped.
    reply_seconds: float = 0.8
    forced_bytes: int = 20_000  # that a grammar may begin with where it leaves no choice


@dataclass(frozen=True)
class ImageConfig:
    """Images in requests, for models that take them."""

    hosts: tuple[str, ...] = ()  # hosts from which images may be fetched; other images have to be data URLs
    most: int = 20  # images in one request
    image_bytes: int = 20 << 20  # of one image
    pixels: int = 50_000_000  # of one image
    pixel_bytes: int = 1 << 30  # what all requests that wait or run may hold of pixels for the model
    seconds: float = 20.0  # for fetching all images of a request
    characters: int = 400_000  # of text in a request with images, which a worker renders


@dataclass(frozen=True)
class AccessConfig:
    """Which requests the server admits, and with which limits."""

    host: str = "127.0.0.1"  # the address that it listens on
    api_key: str | None = field(default=None, repr=False)  # the key that a request has to carry; None: none
    # Several keys as (name, key). What a request leaves behind belongs to the name of its key, ...
    api_keys: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    private_prefixes: bool = False  # ... and so do the prefixes that it has computed
    allow_remote: bool = False  # whether other machines may connect without a key
    allowed_hosts: tuple[str, ...] = ()  # accepted names in Host headers, beside those of this machine
    # Origins of pages that may send requests; empty: mlx-lm's endpoints are open to all of them, ours to pages of this machine.
    allowed_origins: tuple[str, ...] = ()
    max_body_bytes: int = 16 << 20  # of one request
    bodies: int = 32  # the bodies in memory take at most as much as this many of the largest
    max_headers: int = 100
    max_header_bytes: int = 64 << 10
    max_connections: int = 256  # served at a time; as many more may be open between two requests
    event_readers: int = 32  # connections that may read events at a time
    backlog: int = 1024  # connections that may wait to be accepted
    keep_alive_seconds: float = 60.0  # an idle connection is closed after this time
    stall_seconds: float = 30.0  # a request that sends nothing for this long is dropped, ...
    request_seconds: float = 120.0  # ... and so is one that is incomplete after this time
    send_seconds: float = 60.0  # a client that reads nothing of its response for this long is dropped


@dataclass(frozen=True)
class KVEventsConfig:
    """Where block events are published for routers, and how."""

    endpoint: str  # of ZeroMQ, such as tcp://*:5557
    replay: str | None = None  # where past messages can be requested; None: nowhere
    topic: str = ""  # the first frame of each message; {model} in it stands for the model's id
    as_arrays: bool = False  # events as arrays, as vLLM had them until 2026; otherwise as maps
    kept: int = 10_000  # past messages, ...
    kept_bytes: int = 64 << 20  # ... of at most so many bytes
    message_tokens: int = 16_384  # events of more tokens than this go in several messages
    queued: int = 100_000  # messages that wait for a slow subscriber
    replay_queued: int = 1_000  # past messages that wait for a slow client; it gets the next ones later
    silent_seconds: float = 60.0  # a subscriber that answers nothing for this long is dropped, with its messages


@dataclass(frozen=True)
class RankConfig:
    """When the ranks of a group exchange what they have to agree on, and when one of them counts as lost."""

    seconds: float = 20.0  # a rank whose turn takes longer ends its process, as the others do then
    load_seconds: float = 600.0  # the same for a turn that loads a model
    lease_seconds: float = 0.02  # about as long goes on without an exchange while replies are in decode, ...
    most_turns: int = 16  # ... in at most so many steps
    nap_ms: tuple[int, ...] = (5, 20, 50)  # without work, ranks sleep between two exchanges, longer after each calm_seconds
    calm_seconds: float = 1.0


@dataclass(frozen=True)
class ServerConfig:
    """Everything that a server is started with beside its default model."""

    engine: EngineConfig = EngineConfig()
    pool: PoolConfig = PoolConfig()
    store: StoreConfig | None = None  # None: nothing is kept on disk
    models: ModelsConfig = ModelsConfig()
    access: AccessConfig = AccessConfig()
    prompts: PromptConfig = PromptConfig()
    images: ImageConfig = ImageConfig()
    kv_events: KVEventsConfig | None = None  # None: no events are published
    forms: FormConfig = FormConfig()
    ranks: RankConfig = RankConfig()


def kv_bits(bits: int | None, keys: int | None, values: int | None, group_size: int) -> KVBits | None:
    """What options mean: bits for both, and for keys and values where they differ; 16: as the model computes them."""
    found = [bits if own is None else own for own in (keys, values)]
    keys, values = (None if own == 16 else own for own in found)
    return None if keys is None and values is None else KVBits(keys, values, group_size)


def check_store_bits(store: int | None, pool: KVBits | None) -> None:
    """Raises BlockpoolError for a store that is asked to be finer than the pool, whose blocks it writes as they are."""
    if store is not None and pool is not None and store >= max(pool.keys or 16, pool.values or 16):
        raise BlockpoolError(
            f"--store-bits {store} changes nothing: the pool has {pool}, and records are written as it has them. Leave it out."
        )


def parse_seconds(text: str) -> float:
    """'30s', '15m', '2h' or '90' in seconds. Raises BlockpoolError on anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d*)?)\s*([smh]?)", text.strip().lower())
    if found is None:
        raise BlockpoolError(f"{text!r} is no time. Write a number with a unit, such as 30s, 15m or 2h.")
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]]


def parse_bytes(text: str) -> int:
    """'4GB', '512 MiB' or '1000' in bytes. Raises BlockpoolError on anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d*)?)\s*([A-Z]*)", text.strip().upper())
    if found is None or found[2] not in _UNITS:
        raise BlockpoolError(f"{text!r} is no size. Write a number with a unit, such as 4GB or 512MiB.")
    return int(float(found[1]) * _UNITS[found[2]])


def _listed(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))
