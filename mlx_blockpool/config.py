"""Every default, in one place. Sizes are bytes, times are seconds.

A ClassVar is the same for all servers; the fields are those that a server may set.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar
from urllib.parse import urlsplit

from .errors import BlockpoolError

_UNITS = {"": 1, "B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGT", 1)
    for suffix, base in (("", 1000), ("B", 1000), ("IB", 1024))
}

# A max_tokens that never limits a reply: the pool's size does.
WHAT_FITS = 1 << 40

DECODE_PATHS = ("auto", "ragged", "shared", "kernel")

KV_BITS = (8, 4)
GROUP_SIZES = (32, 64, 128)


# At the end of a line of --api-key-file: the key may use /admin/*.
ADMIN_MARK = ":admin"


@dataclass(frozen=True)
class KVBits:
    """The bits in which blocks store keys and values, quantised as mlx does it.

    None: as the model computes them.
    """

    keys: int | None = 8
    values: int | None = 8
    group_size: int = 64  # the number of values that share a scale and a bias

    def __post_init__(self) -> None:
        for name, bits in (("Keys", self.keys), ("Values", self.values)):
            if bits is not None and bits not in KV_BITS:
                raise BlockpoolError(
                    f"{name} cannot be stored in {bits!r} bits. Choose one of {_listed(KV_BITS)}."
                )
        if self.group_size not in GROUP_SIZES:
            raise BlockpoolError(
                f"{self.group_size!r} is not a group size. Choose one of {_listed(GROUP_SIZES)}."
            )

    def __str__(self) -> str:
        if self.keys == self.values:
            return f"{self.keys}-bit keys and values"
        return " and ".join(
            f"{bits}-bit {of}"
            for bits, of in ((self.keys, "keys"), (self.values, "values"))
            if bits is not None
        )

    @property
    def options(self) -> str:
        """The options of a command that choose these bits."""
        both = (
            ((self.keys, "-keys"), (self.values, "-values"))
            if self.keys != self.values
            else ((self.keys, ""),)
        )
        size = (
            [] if self.group_size == KVBits().group_size else [f"--kv-group-size {self.group_size}"]
        )
        return " ".join(
            [f"--kv-bits{which} {own}" for own, which in both if own is not None] + size
        )


@dataclass(frozen=True)
class PoolConfig:
    """How the pool allocates memory."""

    pool_bytes: int | None = (
        None  # hard limit for keys and values; None: half of the memory that the model leaves free
    )
    preallocate: bool = False  # allocate the whole pool at the start instead of slab by slab
    max_tokens: int = (
        512  # tokens that acquire() reserves after a prompt in scripts that pass no other number
    )
    # how a batch reads keys and values; auto: by what each path costs where that was measured, else
    # ragged
    decode_path: str = "auto"
    bits: KVBits | None = None  # how blocks store keys and values; None: as the model computes them
    state_bytes: int | None = (
        # limit in pool_bytes for a hybrid model's states, running and cached; None: a quarter, ...
        None
    )
    states: int = 16  # ... or up to half if a quarter would hold fewer than this many
    pinned_share: float = (
        0.5  # the fraction of the blocks, and of the states, that clients may pin with a TTL
    )
    agent_bytes: int | None = (
        # limit for the prefixes that one named agent has computed; None: only pool_bytes limits
        # them
        None
    )
    alarm_tokens: int = 20_000  # the log warns if of at least this many known tokens ...
    alarm_share: float = 0.05  # ... less than this share was reused


@dataclass(frozen=True)
class EngineConfig:
    """How the engine divides its time and memory, and when a server that makes no progress ends."""

    prefill_tokens: int = 512  # prefill runs in chunks that end at multiples of this
    prefill_rows: int = 8  # the most prompts in one chunk
    # Next to replies chunks become smaller, down to this many tokens, so that a step takes at most
    # 1 / decode_share of a step without a prompt; smaller ones take longer for each token.
    mixed_tokens: ClassVar[int] = 128
    decode_share: float = (
        0.5  # the fraction of the time for decode while prompts wait for prefill; 0 to below 1
    )
    # How many tokens of later prompts may pass the oldest one for each that it gets.
    aged_tokens: ClassVar[int] = 4
    max_members: int = 32  # the most requests that hold caches at a time
    priority_seconds: ClassVar[float] = 10.0  # a step of priority counts as this much waiting, ...
    most_priority_seconds: ClassVar[float] = 60.0  # ... and all steps together as at most this much
    # A long prompt gets a checkpoint after this many tokens, and after two, four... times as many.
    checkpoint_tokens: ClassVar[int] = 2_048
    restore_seconds: ClassVar[float] = (
        0.02  # the longest time between two steps for copying records into the pool
    )
    shared_tokens: int = (
        64  # a request computes a shared prefix shorter than this again instead of waiting for it
    )
    forced_tokens: int = (
        4  # at least this many tokens that a form forces are appended at once instead of one by one
    )
    # whether the speed of a model is measured, unless the prompt store's folder has it: by open()
    # at once, by a server when it is quiet
    measures: bool = False
    # How many tokens are drafted for a request in a step. auto: as many as pay by the costs of
    # forwards on it; off: none; a number: up to this many, whatever they cost.
    drafts: str | int = "auto"
    most_drafted: int = 16  # the most tokens that are drafted for a request in a step
    # How long the first request waits for others whose prompts are being prepared, to start with
    # them.
    join_seconds: float = 0.01
    stall_seconds: float = (
        120.0  # a server with work that computes nothing for this long reports itself unhealthy
    )
    # Metal keeps these bytes from being paged out while an engine runs; None: what the device
    # recommends, as in mlx-lm; 0: the limit is left alone.
    wired_bytes: int | None = None
    stop_seconds: float = 3.0  # how long a shutdown waits for a model that is being loaded
    exit_seconds: ClassVar[float] = (
        4.0  # the process of a server that is to stop ends after this time, whatever hangs
    )
    end_seconds: ClassVar[float] = (
        240.0  # the process ends when its generation thread has hung for this long
    )
    max_positions: int | None = (
        None  # of a prompt and its reply; None: by the model's config.json; 0: no limit
    )
    # The longest reply for a request that mlx-lm serves by itself and that names no max_tokens:
    # memory for all of it is reserved at its start.
    alone_tokens: int = 4096
    endless_tokens: ClassVar[int] = (
        32768  # the same limit if neither the pool nor the model has one
    )

    def __post_init__(self) -> None:
        if self.drafts not in ("auto", "off") and not (
            isinstance(self.drafts, int) and self.drafts > 0
        ):
            raise BlockpoolError(
                f"drafts must be 'auto', 'off' or a positive integer, not {self.drafts!r}"
            )


@dataclass(frozen=True)
class StoreConfig:
    """The prompt store on disk."""

    folder: Path | None = None  # None: the user's cache folder
    # Hard limit for all records, quarantined ones included. Each further server on the folder can
    # exceed it by 2 look_bytes.
    store_bytes: int = 20 * 10**9
    queue_bytes: int = (
        256 * 10**6
    )  # the most bytes that wait for the writer; what exceeds it stays in memory only
    step_bytes: int = 32 * 10**6  # the most bytes copied out of the pool between two steps
    min_free_bytes: int = 2 * 10**9  # free space that is left on the file system
    daily_bytes: int | None = None  # the most bytes written in a day; None: no limit
    # after this time without a request, the ends of conversations are written in partial blocks
    idle_seconds: float = 60.0
    flush_seconds: float = 3.0  # how long a shutdown waits for the writer
    retry_seconds: float = 30.0  # how long a disk that failed is left alone
    # a read without a result after this time counts as failed, and the prompt is computed instead
    answer_seconds: float = 5.0
    look_bytes: int | None = (
        # after writing this much, a server scans for records of others; None: store_bytes / 32
        None
    )
    look_seconds: float = 60.0  # it also scans after this time, if it has written or used anything
    quarantine: float = (
        0.05  # the fraction of store_bytes that bad files may take; the oldest are removed first
    )
    quarantine_files: int = 1_000  # at most, for a folder of very many small files is slow
    # unpinned notes of named agents that are kept; the least recently used are removed first
    agents: int = 2000
    conversations: int = 200  # the same for conversations that are recognised by their beginning
    ahead_bytes: int = 64 << 20  # read ahead of a restore while replies are computed, ...
    ahead_records: int = 16  # ... in at most this many records
    # after this time a disk that was slower than computing is tried again: it may have been busy
    slow_seconds: float = 300.0
    # A state is written at once if the keys and values since the last one are this many times as
    # large.
    state_ratio: int = 10
    # Without keys and values it is written at once this many tokens after the last one.
    state_tokens: int = 1024
    lock_seconds: ClassVar[float] = 1.0  # the longest wait for a transaction of another process
    log_seconds: float = 600.0  # the log repeats a problem of the folder after this time
    hash_threads: ClassVar[int] = 2  # that read the weights of a model

    @property
    def quarantine_bytes(self) -> int:
        return int(self.store_bytes * self.quarantine)


@dataclass(frozen=True)
class ModelsConfig:
    """Which models are loaded, and when they are swapped."""

    max_models: int = 1  # loaded at a time; the pool's bytes are divided between them
    patience_seconds: float = (
        30.0  # how long requests for loaded models may overtake others before a swap is forced
    )
    # A model is unloaded for another once it is idle, or after the longer of patience_seconds and
    # this: its running replies continue when it is loaded again.
    drain_seconds: float = 1.0
    wait_seconds: float = (
        600.0  # a request or command fails if its model could not be loaded within this time
    )
    # A model that is loaded again within this time after a client's command has unloaded it has to
    # be idle before the next one: for patience_seconds first, then twice as long each time, and at
    # most this long.
    most_rest_seconds: float = 3600.0
    # While others wait, an idle model stays loaded for as long as the last swap took, but no longer
    # than this: an agent that has just received its reply soon sends the next request.
    linger_seconds: float = 2.0
    idle_seconds: float | None = (
        None  # a model without requests for this long is unloaded; None: never
    )
    allowed: tuple[str, ...] | None = (
        None  # further models, or folders of models; None: every downloaded model
    )
    downloads: bool = False  # whether a request may cause a download
    download_seconds: float = 5.0  # the hub has to answer within this time
    # Other names of models as (name, model); None: unknown names mean the default model, if only
    # that is served.
    aliases: tuple[tuple[str, str], ...] | None = None
    retry_seconds: float = (
        30.0  # how long a model with correct files that could not be loaded is not tried again
    )
    piece_bytes: int = (
        256 * 10**6
    )  # weights are read in pieces of this size; other loaded models run in between
    # A model is measured when no request has started or ended, and nothing was measured, for this
    # long. Pauses between an agent's turns are often shorter.
    quiet_seconds: float = 10.0
    folders: ClassVar[int] = 1_000  # that a folder of models is searched for


@dataclass(frozen=True)
class PromptConfig:
    """How worker processes render and tokenize prompts."""

    small_bytes: int = 128 << 10  # jobs of at most this size have a worker of their own, ...
    small_seconds: float = 2.0  # ... and move to the large jobs after this time
    large_workers: int = 2  # how many large jobs run at a time
    # Requests that only tokenize have one more worker for small jobs and one for large ones. Of the
    # jobs that wait for or run in each of the two; more are rejected.
    tokenizer_bytes: int = 16 << 20
    seconds: float = 20.0  # processor time for one prompt, ...
    # ... not counting the processor time for loading its tokenizer, which may take this long
    load_seconds: float = 60.0
    memory_bytes: int = 3 << 30  # a worker that has more is ended with its job
    start_seconds: float = 120.0  # a worker has to start within this time
    niceness: ClassVar[int] = 5  # of a worker, so that its server goes first
    tokenizers: int = 4  # that a worker keeps
    # Of the prompts that a worker has encoded with each, whose beginnings later prompts may share:
    earlier_texts: ClassVar[int] = 32
    earlier_size: ClassVar[int] = 8 << 20  # their characters and tokens
    # What requests may pass to templates in addition to the known switches; None: anything.
    template_kwargs: tuple[str, ...] | None = ()


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
    agent_characters: int = 256  # of an agent's name
    name_characters: int = 1_024  # of other names that clients give, such as a session's
    values: int = 200_000  # of its JSON
    depth: int = 200  # of its JSON
    escapes: int = 1_000_000  # escaped characters of its JSON
    digits: int = 400  # of an integer
    texts: int = 2_048  # to embed, as in OpenAI's API, ...
    text_tokens: int = 300_000  # ... and the tokens of all of them
    tokenized: int = 1_000_000  # tokens in the response of a request that tokenizes


class HistoryConfig:
    """What is remembered of past requests, in memory; the oldest is dropped first."""

    responses: int = 1_000  # of /v1/responses, ...
    response_characters: int = (
        64_000_000  # ... and of their conversations, each counted with every response of it
    )
    replies: int = 10_000  # for the normaliser `replay`, ...
    reply_tokens: int = 10_000_000  # ... and of all of them
    explained: int = 1_000  # requests that can be explained
    events: int = 8_192  # from which a reader of /v1/cache/events can resume
    agents: int = 2_000  # whose tokens are counted since the start
    evictions: int = 100_000  # blocks and prefixes that an explanation can call evicted


@dataclass(frozen=True)
class FormConfig:
    """What the form of one reply may take, and how many forms the server caches."""

    schema_bytes: ClassVar[int] = 256 << 10  # of one schema as JSON
    text_bytes: ClassVar[int] = 64 << 10  # of one regular expression or grammar
    values: ClassVar[int] = 20_000  # in one schema
    depth: ClassVar[int] = 64  # of one schema
    enum_values: ClassVar[int] = 10_000  # of one enum
    properties: ClassVar[int] = 2_000  # of one object, ...
    optional_properties: ClassVar[int] = 400  # ... and those of them that may be left out
    patterns: ClassVar[int] = (
        64  # of names; llguidance compares those of an object in pairs, and 300 take seconds
    )
    items: ClassVar[int] = (
        10_000  # that minItems or maxItems counts; llguidance writes a rule for each
    )
    loosened: ClassVar[int] = (
        32  # parameters of a request's tools whose schemas are left out because they cannot be kept
    )
    calls_bytes: ClassVar[int] = 4 << 20  # of the grammar of a request's tool calls
    # llguidance's limits: of what it builds of a grammar, and of what one mask may cost. The worst
    # masks take 10 ms and 40 MB.
    grammar_symbols: int = 200_000
    initial_fuel: int = 1_000_000
    step_fuel: int = 100_000
    step_items: int = 30_000
    row_items: int = 2_000
    # All replies in a grammar share its states, of up to 4 KB each: it is compiled again after this
    # many replies. The states also bound what a text of one value may force in a step, which takes
    # a millisecond for each thousand.
    lexer_states: int = 20_000
    replies: int = 1_000
    compile_seconds: float = 1.0  # processor time for compiling one grammar
    compiled: int = 128  # grammars that stay compiled, ...
    # ... and the memory that they may take, as Compiled.nbytes estimates it; the least recently
    # used are dropped first.
    compiled_bytes: int = 128 << 20
    idle_seconds: float = 300.0  # after this long without a request that needs one, all are dropped
    # Before the reply's limit cuts a form, its end is searched when this many tokens are left, and
    # begun when this many more are left than it needs.
    closing_tokens: ClassVar[int] = 256
    closing_spare: ClassVar[int] = 4
    closing_seconds: ClassVar[float] = 0.02  # processor time for one search
    forced_bytes: ClassVar[int] = 20_000  # that a grammar may begin with where it leaves no choice
    # Processor time of the form of a reply: the other replies of the batch wait for it. For each of
    # its tokens, ...
    token_seconds: ClassVar[float] = 0.01
    spare_seconds: ClassVar[float] = 0.5  # ... and in addition
    most_forced: ClassVar[int] = 32  # forced tokens of a reply that are computed in one pass, ...
    most_forced_together: ClassVar[int] = 64  # ... and those of all replies, with their padding


@dataclass(frozen=True)
class ImageConfig:
    """Images in requests, for models that take them."""

    most: int = 20  # images in one request
    image_bytes: int = 20 << 20  # of one image
    pixels: int = 50_000_000  # of one image
    pixel_bytes: int = 1 << 30  # pixels for the model, of all requests that wait or run
    characters: int = 400_000  # of text in a request with images, which a worker renders


@dataclass(frozen=True)
class AccessConfig:
    """Which requests the server admits, and with which limits."""

    host: str = "127.0.0.1"  # the address that it listens on
    api_key: str | None = field(
        default=None, repr=False
    )  # the key that a request has to carry; None: none
    # Several keys as (name, key). The agents and conversations of a request belong to the name of
    # its key, ...
    api_keys: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    private_prefixes: bool = False  # ... and so do the prefixes that it has computed
    admin_keys: tuple[str, ...] = field(
        default=(), repr=False
    )  # those of api_keys that may use /admin/*; empty: the first
    allow_remote: bool = False  # whether other machines may connect without a key
    allowed_hosts: tuple[
        str, ...
    ] = ()  # accepted names in Host headers, in addition to those of this machine
    # Origins of pages that are trusted as pages of this machine are. Empty: none, and others reach
    # mlx-lm's endpoints only. `*`: none, and others reach all endpoints but those of agents,
    # figures and models.
    allowed_origins: tuple[str, ...] = ()
    max_body_bytes: int = 16 << 20  # of one request
    max_tokenizer_bytes: int = (
        4 << 20
    )  # of one request that only tokenizes, or embeds; about 1,000,000 tokens of text
    bodies: int = 32  # the bodies in memory take at most this many times max_body_bytes
    max_header_bytes: int = 64 << 10
    max_connections: int = 256  # served at a time; the same number may be open between two requests
    event_readers: int = 32  # connections that may read events at a time, shared among the clients
    reader_retry_seconds: int = (
        30  # a reader that lost its place to another one reconnects after this time
    )
    comment_seconds: float = 15.0  # a comment after this long without an event keeps the connection
    backlog: ClassVar[int] = 1024  # connections that may wait to be accepted
    keep_alive_seconds: float = 60.0  # an idle connection is closed after this time
    stall_seconds: float = 30.0  # a request that sends nothing for this long is dropped, ...
    request_seconds: float = 120.0  # ... and so is one that is incomplete after this time
    send_seconds: float = (
        60.0  # a client that reads nothing of its response for this long is dropped
    )


@dataclass(frozen=True)
class KVEventsConfig:
    """Where block events are published for routers, and how."""

    endpoint: str  # of ZeroMQ, such as tcp://*:5557
    replay: str | None = None  # where past messages can be requested; None: nowhere
    topic: str = ""  # the first frame of each message; {model} in it stands for the model's id
    as_arrays: bool = False  # events as arrays, as vLLM had them until 2026; otherwise as maps
    kept: int = 10_000  # past messages, ...
    kept_bytes: int = 64 << 20  # ... of at most this many bytes
    message_tokens: int = 16_384  # events of more tokens than this go in several messages
    queued: int = 100_000  # messages that wait for a slow subscriber
    replay_clients: int = 32  # that get past messages at a time
    replay_queued: int = (
        1_000  # past messages that wait for a slow client; it gets the next ones later
    )
    silent_seconds: float = (
        60.0  # a subscriber that answers nothing for this long is dropped, with its messages
    )


@dataclass(frozen=True)
class RankConfig:
    """When the ranks of a group synchronise, and when one of them counts as lost."""

    seconds: float = 20.0  # a rank whose turn takes longer ends its process, as the others do then
    load_seconds: float = 600.0  # the same for a turn that loads a model
    lease_seconds: float = (
        0.02  # about the time between two exchanges while replies are in decode, ...
    )
    most_turns: int = 16  # ... which is at most this many steps
    nap_ms: tuple[int, ...] = (
        5,
        20,
        50,
    )  # without work, ranks sleep between two exchanges, longer after each calm_seconds
    long_nap_ms: int = 1000  # ... and at last this long, if rank 0 can end the naps of the others
    calm_seconds: float = 1.0


@dataclass(frozen=True)
class ServerConfig:
    """The whole configuration of a server, except its default model."""

    engine: EngineConfig = EngineConfig()
    pool: PoolConfig = PoolConfig()
    store: StoreConfig | None = None  # None: nothing is stored on disk
    models: ModelsConfig = ModelsConfig()
    access: AccessConfig = AccessConfig()
    prompts: PromptConfig = PromptConfig()
    images: ImageConfig = ImageConfig()
    kv_events: KVEventsConfig | None = None  # None: no events are published
    forms: FormConfig = FormConfig()
    ranks: RankConfig = RankConfig()


def kv_bits(
    bits: int | None, keys: int | None, values: int | None, group_size: int
) -> KVBits | None:
    """The bits that options choose: `bits` for both, or `keys` and `values` where they differ;
    16: as the model computes them.
    """
    found = [bits if own is None else own for own in (keys, values)]
    keys, values = (None if own == 16 else own for own in found)
    return None if keys is None and values is None else KVBits(keys, values, group_size)


def parse_seconds(text: str) -> float:
    """'30s', '15m', '2h' or '90' in seconds. Raises BlockpoolError on anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d*)?)\s*([smh]?)", text.strip().lower())
    if found is None:
        raise BlockpoolError(
            f"{text!r} is not a duration; use a number with a unit, e.g. 30s, 15m or 2h"
        )
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]]


def parse_bytes(text: str) -> int:
    """'4GB', '512 MiB' or '1000' in bytes. Raises BlockpoolError on anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d*)?)\s*([A-Z]*)", text.strip().upper())
    if found is None or found[2] not in _UNITS:
        raise BlockpoolError(
            f"{text!r} is not a size; use a number with a unit, e.g. 4GB or 512MiB"
        )
    return int(float(found[1]) * _UNITS[found[2]])


def check_port(port: int, least: int = 1) -> int:
    """Return the port.

    Raises BlockpoolError for other numbers, which getaddrinfo() takes modulo 65536. `least`: 0 or
    1.
    """
    if not least <= port <= 65535:
        raise BlockpoolError(f"--port must be between {least} and 65535 (got {port})")
    return port


def user_config_folder() -> Path:
    """Where a user's settings for mlx-blockpool are: in $XDG_CONFIG_HOME if that is an absolute
    path, else ~/.config, also on macOS.
    """
    given = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    return (given if given.is_absolute() else Path.home() / ".config") / "mlx-blockpool"


def check_url(url: str) -> str:
    """Return the URL of a server; one without a scheme is http's.

    Raises BlockpoolError if it is malformed or its port is not between 1 and 65535.
    """
    url = url if "://" in url else f"http://{url}"
    try:
        is_valid = urlsplit(url).port != 0
    except ValueError:
        is_valid = False
    if not is_valid:
        raise BlockpoolError(
            "--url must be a URL with a port between 1 and 65535, such as http://127.0.0.1:8080 "
            f"(got {url})"
        )
    return url


def _listed(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))


def is_bound(endpoint: str) -> bool:
    """Return whether subscribers connect to an endpoint; the publisher connects to others.
    vLLM's rule.
    """
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))
