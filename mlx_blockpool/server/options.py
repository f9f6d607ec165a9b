"""The options of `serve` beside mlx-lm's own, and the configs that they make."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..config import (
    DECODE_PATHS,
    GROUP_SIZES,
    KV_BITS,
    WHAT_FITS,
    AccessConfig,
    EngineConfig,
    ImageConfig,
    KVBits,
    KVEventsConfig,
    ModelsConfig,
    PoolConfig,
    PromptConfig,
    ServerConfig,
    StoreConfig,
    check_store_bits,
    kv_bits,
    parse_bytes,
    parse_seconds,
)
from ..errors import BlockpoolError
from .access import host_name
from .live.kv_events import is_bound

KEY_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
# mlx-lm's default of --allowed-origins. It is no list, so that a user's own `*` differs.
ANY_ORIGIN = ("*",)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add our options to mlx-lm's parser, and change the defaults of its own."""
    _add_pool_options(parser.add_argument_group("block pool").add_argument)
    _add_store_options(parser.add_argument_group("store").add_argument)
    _add_model_options(parser.add_argument_group("models").add_argument)
    _add_request_options(parser.add_argument_group("requests").add_argument)
    _add_event_options(parser.add_argument_group("events").add_argument)
    _add_access_options(parser.add_argument_group("access").add_argument)
    # With kv_bits mlx-lm would leave out batches, and quantise once more what the pool has quantised.
    parser.set_defaults(prefill_step_size=EngineConfig.prefill_tokens, allowed_origins=ANY_ORIGIN, kv_bits=None)


def _add_pool_options(add: Callable[..., Any]) -> None:
    pool = "Limit for keys and values in memory, such as 4GB; auto (default): half of what the model leaves free"
    add("--pool-bytes", type=_or_word(parse_bytes, auto=None), metavar="SIZE", help=pool)
    add("--preallocate", action="store_true", help="Allocate the whole pool at the start instead of slab by slab")
    add("--agent-bytes", **SIZE, help="Limit in the pool for the prefixes that one agent has computed (default: none)")
    add("--anonymous-bytes", **SIZE, help="The same limit for all requests together that name no agent (default: none)")
    share = "Share of the time for running replies while long prompts are computed, 0 to 0.95 (default: %(default)s)"
    add("--decode-share", type=_share, default=EngineConfig.decode_share, metavar="SHARE", help=share)
    for what in ("keys", "values"):
        own = f"The bits of {what} where they differ from --kv-bits; 16: as the model computes them"
        add(f"--kv-bits-{what}", type=int, choices=(16, *KV_BITS), help=own)
    path = "How a batch reads its keys and values; auto (default): by what each costs (--measure)"
    add("--decode-path", choices=DECODE_PATHS, default=PoolConfig.decode_path, help=path)
    measure = "Measure what steps cost when a model is first loaded, and remember it (auto, the default); off: neither"
    add("--measure", choices=("auto", "off"), default="auto", help=measure)
    drafts = "Draft tokens from what is known: auto, as many as pay on this device; off; or up to N (default: %(default)s)"
    add("--drafts", type=_drafts, default=EngineConfig.drafts, metavar="N", help=drafts)
    wired = "Memory that macOS must not page out; auto (default): what the device recommends; off: leave the limit alone"
    add("--wired-limit", type=_or_word(parse_bytes, auto=None, off=0), metavar="SIZE", help=wired)


def _add_store_options(add: Callable[..., Any]) -> None:
    add("--no-store", action="store_true", help="Keep nothing on disk")
    add("--store-dir", type=Path, metavar="DIR", help="Folder of the store (default: in the user's cache folder)")
    add("--store-bytes", **SIZE, default=StoreConfig.store_bytes, help="Limit for the store, such as 20GB (default: 20 GB)")
    add("--store-model-bytes", **SIZE, help="Limit for the records of one model in the store (default: --store-bytes)")
    add("--store-bits", type=int, choices=(4, 8), help="Quantise what is stored (default: store it as it is in memory)")


def _add_model_options(add: Callable[..., Any]) -> None:
    most = "Keep up to N models loaded, each with an Nth of --pool-bytes; the least recently used is swapped out (default: 1)"
    add("--max-models", **COUNT, default=ModelsConfig.max_models, help=most)
    patience = "How long requests for loaded models may overtake those for another, such as 30s (default: 30s)"
    add("--swap-patience", **TIME, default=ModelsConfig.patience_seconds, help=patience)
    add("--idle-unload", **TIME, help="Unload a model that has had no request for this time, such as 15m (default: never)")
    allowed = "Folders, folders of models and hub ids, separated by commas, for requests to name (default: the downloaded models)"
    add("--allow-models", **NAMES, help=allowed)
    add("--allow-downloads", action="store_true", help="Let requests download models from the hub")
    aliases = "Other names of models, as NAME=MODEL,..; off: none (default: a server of one model accepts unknown names)"
    add("--model-aliases", type=_aliases, metavar="NAMES", help=aliases)
    positions = "Limit for the tokens of a prompt and its reply in place of the one in config.json; off: none"
    add("--max-positions", type=_or_word(_count, off=0), metavar="N", help=positions)


def _add_request_options(add: Callable[..., Any]) -> None:
    normalise = "Normalisers for volatile prompts beside vendor-header, such as bookkeeping,date,replay; none: only those named"
    add("--normalise", **NAMES, default=(), help=normalise)
    warm_up = 'Compute prompts at the start: each line is JSON, a chat\'s body, {"prompt": "text"} or a text in quotes'
    add("--warm-up", type=Path, metavar="FILE", help=warm_up)
    add("--max-body", **SIZE, default=AccessConfig.max_body_bytes, help="Limit for one request, such as 64MB (default: 16 MiB)")
    kwargs = "Names, separated by commas, that chat_template_kwargs may hold beside the usual switches of templates, or any; "
    kwargs += "any and chat_template let requests bring templates of their own (default: none)"
    add("--allow-template-kwargs", type=_or_word(_names, any=None), default=(), metavar="NAMES", help=kwargs)
    hosts = "Hosts, separated by commas, that images in requests are fetched from (default: none; images come as data URLs)"
    add("--allow-image-hosts", **HOSTS, help=hosts)


def _add_event_options(add: Callable[..., Any]) -> None:
    where = "Publish blocks stored and removed in vLLM's form on this ZeroMQ endpoint, such as tcp://*:5557 (default: nowhere)"
    add("--kv-events", metavar="ENDPOINT", help=where)
    add("--kv-events-replay", metavar="ENDPOINT", help="Where routers request past messages, such as tcp://*:5558")
    topic = "The topic of these messages; {model} stands for the model's id (default: none)"
    add("--kv-events-topic", default=KVEventsConfig.topic, metavar="TEXT", help=topic)
    form = "How each event is packed; array is vLLM's form before June 2026 (default: %(default)s)"
    add("--kv-events-form", choices=("map", "array"), default="map", help=form)


def _add_access_options(add: Callable[..., Any]) -> None:
    key = "Reject requests without this key as a bearer token or x-api-key. Other users may see it in the list of processes, "
    key += "unlike the keys of --api-key-file and MLX_BLOCKPOOL_API_KEY"
    add("--api-key", metavar="KEY", help=key)
    add("--api-key-file", type=Path, metavar="FILE", help="A file with the key, or with several keys as lines name:key")
    private = "Share no prefixes between the names of --api-key-file: times and cached tokens reveal no others' prompts"
    add("--private-prefixes", action="store_true", help=private)
    add("--allow-remote", action="store_true", help="Listen on addresses that other machines reach, without a key")
    names = "Names, separated by commas, under which clients reach this server (default: localhost, if --host is that)"
    add("--allow-hosts", **HOSTS, help=names)


def _or_word(parse: Callable[[str], Any], **words: Any) -> Callable[[str], Any]:
    """`parse`, or the value of one of these words."""
    return lambda text: words[text.strip()] if text.strip() in words else parse(text)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _hosts(text: str) -> tuple[str, ...]:
    return tuple(map(host_name, _names(text)))


def _aliases(text: str) -> tuple[tuple[str, str], ...]:
    """'sonnet=some/model,..', or off."""
    pairs = [] if text == "off" else [part.partition("=") for part in _names(text)]
    if not all(name and model for name, _, model in pairs):
        raise argparse.ArgumentTypeError(f"{text} is neither off nor NAME=MODEL,..")
    return tuple((name, model) for name, _, model in pairs)


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text} is not a number from 1")
    return int(text)


def _seconds(text: str) -> float:
    try:
        return parse_seconds(text)
    except BlockpoolError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _drafts(text: str) -> str | int:
    if text in ("auto", "off"):
        return text
    if not text.isdecimal() or not 1 <= int(text) <= EngineConfig.most_drafted:
        raise argparse.ArgumentTypeError(f"{text} is neither auto nor off nor a number from 1 to {EngineConfig.most_drafted}")
    return int(text)


def _share(text: str) -> float:
    share = float(text)
    if not 0 <= share <= 0.95:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 0.95")
    return share


# Kinds of options.
SIZE: dict[str, Any] = {"type": parse_bytes, "metavar": "SIZE"}
TIME: dict[str, Any] = {"type": _seconds, "metavar": "TIME"}
COUNT: dict[str, Any] = {"type": _count, "metavar": "N"}
NAMES: dict[str, Any] = {"type": _names, "metavar": "NAMES"}
HOSTS: dict[str, Any] = {"type": _hosts, "metavar": "NAMES", "default": ()}

# Changes of mlx-lm's own options.
CHANGED_OPTIONS: dict[str, dict[str, Any]] = {
    "--max-tokens": {
        "type": _or_word(_count, auto=WHAT_FITS),
        "default": WHAT_FITS,
        "metavar": "N",
        "help": "Tokens of a reply whose request has no limit; auto: as many as the model and the pool have room for (default)",
    },
    "--kv-bits": {
        "dest": "pool_bits",
        "choices": KV_BITS,
        "help": "Hold the pool's keys and values in so many bits (default: as the model computes them)",
    },
    "--kv-group-size": {
        "choices": GROUP_SIZES,
        "help": "How many quantised values share a scale and a bias; 32 where heads are no multiple of it (default: %(default)s)",
    },
    "--quantized-kv-start": {
        "default": 0,
        "metavar": "N",
        "help": "Accepted from command lines of mlx-lm; the pool quantises from the first token, whatever the number",
    },
}


# -- keys and values in 8 or 4 bits ------------------------------------------------------------------------------------

FOUR_BITS = (
    "At 4 bits models lose tool calls: in a public test 3 to 10 of 14 passed, and 13 at 16 bits. "
    "--kv-bits 8, or --kv-bits-keys 8 --kv-bits-values 4, loses less: with a small model 1 call of 480 instead of 5."
)


def bits_of(args: Any) -> KVBits | None:
    return kv_bits(args.pool_bits, args.kv_bits_keys, args.kv_bits_values, args.kv_group_size)


def warnings(args: Any) -> list[str]:
    """What the person who starts the server should know of its options."""
    found = []
    if args.pool_bits == 4 and args.kv_bits_keys is None and args.kv_bits_values is None:
        found.append(FOUR_BITS)
    if bits_of(args) is not None and args.quantized_kv_start:
        found.append(f"--quantized-kv-start {args.quantized_kv_start} is not used: the pool quantises from the first token.")
    return found


# -- configs -----------------------------------------------------------------------------------------------------------


def server_config(args: Any) -> ServerConfig:
    """Raises BlockpoolError for options that do not go together."""
    return ServerConfig(
        EngineConfig(
            prefill_tokens=args.prefill_step_size,
            prefill_rows=args.prompt_concurrency,
            decode_share=args.decode_share,
            max_members=args.decode_concurrency,
            drafts=args.drafts,
            measures=args.measure == "auto",
            max_positions=args.max_positions,
            wired_bytes=args.wired_limit,
        ),
        PoolConfig(
            args.pool_bytes or args.prompt_cache_bytes,
            args.preallocate,
            decode_path=args.decode_path,
            agent_bytes=args.agent_bytes,
            anonymous_bytes=args.anonymous_bytes,
            bits=bits_of(args),
        ),
        None if args.no_store else store_config(args),
        ModelsConfig(
            max_models=args.max_models,
            patience_seconds=args.swap_patience,
            idle_seconds=args.idle_unload,
            allowed=args.allow_models,
            downloads=args.allow_downloads,
            aliases=args.model_aliases,
        ),
        access_config(args),
        PromptConfig(template_kwargs=args.allow_template_kwargs),
        ImageConfig(args.allow_image_hosts),
        kv_events_config(args),
    )


def store_config(args: Any) -> StoreConfig:
    """Raises BlockpoolError for a store that is asked to be finer than the pool."""
    check_store_bits(args.store_bits, bits_of(args))
    return StoreConfig(args.store_dir, args.store_bytes, args.store_bits, model_bytes=args.store_model_bytes)


def kv_events_config(args: Any) -> KVEventsConfig | None:
    """None: no events are published. Raises BlockpoolError for an endpoint that is open to other machines without leave."""
    if args.kv_events is None:
        if args.kv_events_replay is not None or args.kv_events_topic:
            raise BlockpoolError("--kv-events-replay and --kv-events-topic need --kv-events ENDPOINT.")
        return None
    for endpoint in (args.kv_events, args.kv_events_replay):
        if endpoint is not None and endpoint.startswith("tcp://") and is_bound(endpoint) and not args.allow_remote:
            raise BlockpoolError(
                f"--kv-events {endpoint} lets other machines read the tokens of all prompts, and ZeroMQ asks for no key. "
                "Say --allow-remote if the network is yours alone, or publish on ipc:///path."
            )
    return KVEventsConfig(args.kv_events, args.kv_events_replay, args.kv_events_topic, args.kv_events_form == "array")


def access_config(args: Any) -> AccessConfig:
    """Raises BlockpoolError for invalid keys."""
    several = () if args.api_key is not None or args.api_key_file is None else named_keys(_text_of(args.api_key_file))
    if args.private_prefixes and not several:
        raise BlockpoolError("--private-prefixes needs keys with names. Give --api-key-file a file with lines name:key.")
    return AccessConfig(
        args.host,
        None if several else api_key(args.api_key, args.api_key_file, os.environ.get("MLX_BLOCKPOOL_API_KEY")),
        several,
        args.private_prefixes,
        allow_remote=args.allow_remote,
        allowed_hosts=args.allow_hosts,
        allowed_origins=() if args.allowed_origins is ANY_ORIGIN else tuple(args.allowed_origins),
        max_body_bytes=args.max_body,
    )


def api_key(given: str | None, file: Any, environment: str | None) -> str | None:
    """The first key of: the option, a file's content, the environment. Raises BlockpoolError, whose text has no key."""
    key = _text_of(file) if given is None and file is not None else given
    key = environment or None if key is None else key
    if key is not None:
        _check_plain(key)
    return key


def named_keys(text: str) -> tuple[tuple[str, str], ...]:
    """(name, key) of each line `name:key`; none for a text that is one key. Raises BlockpoolError, whose text has no key."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    found = [line.partition(":")[::2] for line in lines]
    if len(lines) < 2 and not all(KEY_NAME.fullmatch(name) and key for name, key in found):
        return ()
    for number, (name, key) in enumerate(found, 1):
        if not KEY_NAME.fullmatch(name):
            raise BlockpoolError(
                f"Key {number} of --api-key-file has no name. Write name:key, the name in letters, digits, . _ -"
            )
        _check_plain(key)
    if len({key for _, key in found}) < len(found):
        raise BlockpoolError("Two keys of --api-key-file are the same. Give each name a key of its own.")
    return tuple(found)


def _text_of(file: Any) -> str:
    try:
        return str(file.read_text(encoding="utf-8").strip())
    except (OSError, UnicodeError) as error:
        raise BlockpoolError(
            f"--api-key-file {file} cannot be read: {type(error).__name__}. Give a text file with a key."
        ) from None


def _check_plain(key: str) -> None:
    if not (key.isascii() and key.isprintable() and key.strip() == key and key):
        raise BlockpoolError("The API key is empty, or has spaces around it or other characters than ASCII. Choose another one.")
