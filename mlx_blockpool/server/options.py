"""The options of `serve` in addition to mlx-lm's own, the settings file, and the configs that
they make.
"""

from __future__ import annotations

import argparse
import os
import re
import tomllib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..config import (
    ADMIN_MARK,
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
    check_port,
    is_bound,
    kv_bits,
    parse_bytes,
    parse_seconds,
    user_config_folder,
)
from ..demo import model_path
from ..errors import BlockpoolError
from ..formatting import Parser, nearest
from ..mlx_lm_compat import add_server_options
from .origins import host_name

KEY_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
# mlx-lm's default of --allowed-origins. A tuple, because a user's own `*` is a list.
ANY_ORIGIN = ("*",)
CONFIG_FILE = "config.toml"
EXAMPLES = """  mlx-blockpool serve demo
  mlx-blockpool serve mlx-community/Qwen3-8B-4bit --kv-bits 8
  mlx-blockpool serve --allow-models ~/models --max-models 2"""


class ServeParser(Parser):
    """Has mlx-lm's options, some of them changed, and ours."""

    def __init__(self) -> None:
        about = "mlx-lm's server on a block pool."
        super().__init__(prog="mlx-blockpool serve", description=about, examples=EXAMPLES)
        model = "the same as --model: a folder, the id of a model on the hub, or demo"
        self.add_argument("name", nargs="?", metavar="MODEL", help=model)
        add_server_options(self)
        add_options(self)

    def add_argument(self, *names: Any, **given: Any) -> Any:
        return super().add_argument(*names, **{**given, **CHANGED_OPTIONS.get(names[0], {})})


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of a command line and the settings file, before mlx is imported.

    Raises BlockpoolError for a settings file or a port that cannot be used, and SystemExit as
    argparse.
    """
    parser = ServeParser()
    args = parser.parse_args(with_settings(list(arguments), parser))
    check_port(args.port, least=0)
    given = any(part.partition("=")[0] == "--model" for part in arguments)
    if args.name is not None and given:
        parser.error(f"the model is named twice: {args.name} and --model {args.model}")
    args.model = model_path(args.name or args.model or "") or None
    return args


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add our options to mlx-lm's parser, and change the defaults of its own."""
    add = parser.add_argument_group("block pool").add_argument
    add(
        "--pool-bytes",
        type=_or_word(_size, auto=None),
        metavar="SIZE",
        help="Limit for keys and values in memory, such as 4GB; auto (default): half of what the "
        "model leaves free",
    )
    add(
        "--agent-bytes",
        **SIZE,
        help="Limit in the pool for the prefixes that one agent has computed (default: none)",
    )
    add(
        "--drafts",
        type=_drafts,
        default=EngineConfig.drafts,
        metavar="N",
        help="Speculative tokens, taken from earlier text: auto, as many as pay here; off; or up "
        "to N (default: %(default)s)",
    )

    add = parser.add_argument_group("store").add_argument
    add("--no-store", action="store_true", help="Keep nothing on disk")
    add(
        "--store-dir",
        type=Path,
        metavar="DIR",
        help="Folder of the store (default: in the user's cache folder)",
    )
    add(
        "--store-bytes",
        **SIZE,
        default=StoreConfig.store_bytes,
        help="Limit for the store, such as 20GB (default: 20 GB)",
    )

    add = parser.add_argument_group("models").add_argument
    add(
        "--max-models",
        **COUNT,
        default=ModelsConfig.max_models,
        help="Keep up to N models loaded, each with an Nth of --pool-bytes; the least recently "
        "used is swapped out (default: 1)",
    )
    add(
        "--idle-unload",
        **TIME,
        help="Unload a model that has had no request for this time, such as 15m (default: never)",
    )
    add(
        "--allow-models",
        **NAMES,
        help="Folders, folders of models and hub ids, separated by commas, for requests to name "
        "(default: the downloaded models)",
    )
    add("--allow-downloads", action="store_true", help="Let requests download models from the hub")
    add(
        "--model-aliases",
        type=_aliases,
        metavar="NAMES",
        help="Other names of models, as NAME=MODEL,..; off: none (default: a server of one model "
        "accepts unknown names)",
    )

    add = parser.add_argument_group("requests").add_argument
    add(
        "--normalise",
        **NAMES,
        default=(),
        help="Normalisers for volatile prompts, such as bookkeeping,date,replay (default: "
        "vendor-header,environment); none: only those named",
    )
    add(
        "--warm-up",
        type=Path,
        metavar="FILE",
        help='Compute prompts at the start: each line is JSON, a chat\'s body, {"prompt": "text"} '
        "or a text in quotes",
    )

    add = parser.add_argument_group("events").add_argument
    add(
        "--kv-events",
        metavar="ENDPOINT",
        help="Publish blocks stored and removed in vLLM's form on this ZeroMQ endpoint, such as "
        "tcp://*:5557 (default: nowhere)",
    )

    add = parser.add_argument_group("access").add_argument
    add(
        "--api-key",
        metavar="KEY",
        help="Reject requests without this key as a bearer token or x-api-key. Other users may "
        "see it in the list of processes, unlike the keys of --api-key-file and "
        "MLX_BLOCKPOOL_API_KEY",
    )
    add(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="A file with the key, or with several keys as lines name:key, or name:key:admin for "
        "those that may use /admin/*",
    )
    add(
        "--private-prefixes",
        action="store_true",
        help="Share no prefixes between the names of --api-key-file: times and cached tokens "
        "reveal no others' prompts",
    )
    add(
        "--allow-remote",
        action="store_true",
        help="Listen on addresses that other machines reach, without a key",
    )
    add(
        "--allow-hosts",
        type=_hosts,
        default=(),
        metavar="NAMES",
        help="Names, separated by commas, under which clients reach this server (default: "
        "localhost, if --host is that)",
    )

    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help='A TOML file of options, such as store-bytes = "40GB", also of those for experiments '
        f"that are not listed here (default: ~/.config/mlx-blockpool/{CONFIG_FILE}, if it is "
        "there)",
    )
    # For experiments: they belong in the file of --config, and --help leaves them out.
    hidden = partial(parser.add_argument, help=argparse.SUPPRESS)
    hidden("--preallocate", action="store_true")
    hidden("--decode-share", type=_share, default=EngineConfig.decode_share)
    hidden("--kv-bits-keys", type=int, choices=(16, *KV_BITS))
    hidden("--kv-bits-values", type=int, choices=(16, *KV_BITS))
    hidden("--decode-path", choices=DECODE_PATHS, default=PoolConfig.decode_path)
    hidden("--measure", choices=("auto", "off"), default="auto")
    hidden("--wired-limit", type=_or_word(_size, auto=None, off=0))
    hidden("--swap-patience", **TIME, default=ModelsConfig.patience_seconds)
    hidden("--max-positions", type=_or_word(_count, off=0))
    hidden("--allow-template-kwargs", type=_or_word(_names, any=None), default=())
    hidden("--max-body", **SIZE, default=AccessConfig.max_body_bytes)
    hidden("--kv-events-replay")
    hidden("--kv-events-topic", default=KVEventsConfig.topic)
    hidden("--kv-events-form", choices=("map", "array"), default="map")
    # With kv_bits mlx-lm would leave out batches, and quantise once more what the pool has
    # quantised.
    parser.set_defaults(
        prefill_step_size=EngineConfig.prefill_tokens, allowed_origins=ANY_ORIGIN, kv_bits=None
    )


def with_settings(arguments: list[str], parser: argparse.ArgumentParser) -> list[str]:
    """Return the arguments with those of the settings file before them, so that the command line
    wins. The file is that of --config, or CONFIG_FILE where there is one.

    parser: of the options that the file may have.
    Raises BlockpoolError for a file that cannot be read, for unknown options, and for values that
    are not true, strings, numbers or lists of them.
    """
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--config", type=Path)
    file: Path | None = own.parse_known_args(arguments)[0].config
    if file is None:
        file = user_config_folder() / CONFIG_FILE
        if not file.exists():
            return arguments
    try:
        found = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        advice = "Give a TOML file, with lines such as kv-bits = 8."
        raise BlockpoolError(f"{file} cannot be read: {error}. {advice}") from error
    known = [name.removeprefix("--") for name in parser._option_string_actions]
    return [
        part for name, value in found.items() for part in _arguments_of(file, name, value, known)
    ] + arguments


def _arguments_of(file: Path, name: str, value: Any, known: list[str]) -> list[str]:
    option = name.replace("_", "-")
    if option not in known or option in ("config", "help"):
        advice = nearest(option, known) or "See `mlx-blockpool serve --help`."
        raise BlockpoolError(f"{file}: unknown option {name}. {advice}")
    if value is True:
        return [f"--{option}"]
    if isinstance(value, list):
        value = ",".join(map(str, value))
    if value is False or not isinstance(value, str | int | float):
        advice = "Leave it out for the default."
        raise BlockpoolError(f"{file}: {name} must be true, a string, a number or a list. {advice}")
    if isinstance(value, str) and value.startswith("~/"):
        # No shell has done it.
        value = str(Path(value).expanduser())
    return [f"--{option}={value}"]


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


def _parsed(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """`parse` with its BlockpoolErrors as argparse reports those of an option."""

    def parsed(text: str) -> Any:
        try:
            return parse(text)
        except BlockpoolError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parsed


_seconds, _size = _parsed(parse_seconds), _parsed(parse_bytes)


def _drafts(text: str) -> str | int:
    if text in ("auto", "off"):
        return text
    most = EngineConfig().most_drafted
    if not text.isdecimal() or not 1 <= int(text) <= most:
        raise argparse.ArgumentTypeError(
            f"{text} is neither auto nor off nor a number from 1 to {most}"
        )
    return int(text)


def _share(text: str) -> float:
    share = float(text)
    if not 0 <= share <= 0.95:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 0.95")
    return share


# Kinds of options.
SIZE: dict[str, Any] = {"type": _size, "metavar": "SIZE"}
TIME: dict[str, Any] = {"type": _seconds, "metavar": "TIME"}
COUNT: dict[str, Any] = {"type": _count, "metavar": "N"}
NAMES: dict[str, Any] = {"type": _names, "metavar": "NAMES"}

# Changes of mlx-lm's own options.
CHANGED_OPTIONS: dict[str, dict[str, Any]] = {
    "--port": {
        "metavar": "N",
        "help": "Port for the HTTP server; 0: any free one (default: %(default)s)",
    },
    "--max-tokens": {
        "type": _or_word(_count, auto=WHAT_FITS),
        "default": WHAT_FITS,
        "metavar": "N",
        "help": "Tokens of a reply whose request has no limit; auto: as many as the model and the "
        "pool allow (default)",
    },
    "--kv-bits": {
        "dest": "pool_bits",
        "choices": KV_BITS,
        "help": "Bits of the pool's keys and values (default: as the model computes them)",
    },
    "--kv-group-size": {
        "choices": GROUP_SIZES,
        "help": argparse.SUPPRESS,
    },
    "--quantized-kv-start": {
        "default": 0,
        "help": argparse.SUPPRESS,
    },
}


# -- keys and values in 8 or 4 bits ----------------------------------------------------------------

FOUR_BITS = (
    "At 4 bits models lose tool calls: in a public test 3 to 10 of 14 passed, and 13 at 16 bits. "
    "--kv-bits 8, or --kv-bits-keys 8 --kv-bits-values 4, loses less: with a small model 1 call "
    "of 480 instead of 5."
)


def bits_of(args: Any) -> KVBits | None:
    return kv_bits(args.pool_bits, args.kv_bits_keys, args.kv_bits_values, args.kv_group_size)


def warnings(args: Any) -> list[str]:
    """What the person who starts the server should know of its options."""
    found = []
    if args.pool_bits == 4 and args.kv_bits_keys is None and args.kv_bits_values is None:
        found.append(FOUR_BITS)
    if bits_of(args) is not None and args.quantized_kv_start:
        found.append(
            f"--quantized-kv-start {args.quantized_kv_start} is not used: the pool quantises from "
            "the first token."
        )
    return found


# -- configs ---------------------------------------------------------------------------------------


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
        ImageConfig(),
        kv_events_config(args),
    )


def store_config(args: Any) -> StoreConfig:
    return StoreConfig(args.store_dir, args.store_bytes)


def kv_events_config(args: Any) -> KVEventsConfig | None:
    """None: no events are published.

    Raises BlockpoolError for an endpoint that is open to other machines without leave.
    """
    if args.kv_events is None:
        if args.kv_events_replay is not None or args.kv_events_topic:
            raise BlockpoolError(
                "--kv-events-replay and --kv-events-topic need --kv-events ENDPOINT."
            )
        return None
    for endpoint in (args.kv_events, args.kv_events_replay):
        if (
            endpoint is not None
            and endpoint.startswith("tcp://")
            and is_bound(endpoint)
            and not args.allow_remote
        ):
            raise BlockpoolError(
                f"--kv-events {endpoint} lets other machines read the tokens of all prompts, and "
                "ZeroMQ asks for no key. "
                "Say --allow-remote if the network is yours alone, or publish on ipc:///path."
            )
    return KVEventsConfig(
        args.kv_events, args.kv_events_replay, args.kv_events_topic, args.kv_events_form == "array"
    )


def access_config(args: Any) -> AccessConfig:
    """Raises BlockpoolError for invalid keys."""
    text = (
        "" if args.api_key is not None or args.api_key_file is None else _text_of(args.api_key_file)
    )
    several = named_keys(text)
    if args.private_prefixes and not several:
        raise BlockpoolError(
            "--private-prefixes needs keys with names. Give --api-key-file a file with lines "
            "name:key."
        )
    return AccessConfig(
        args.host,
        None
        if several
        else api_key(args.api_key, args.api_key_file, os.environ.get("MLX_BLOCKPOOL_API_KEY")),
        several,
        args.private_prefixes,
        admin_keys(text) if several else (),
        allow_remote=args.allow_remote,
        allowed_hosts=args.allow_hosts,
        allowed_origins=() if args.allowed_origins is ANY_ORIGIN else tuple(args.allowed_origins),
        max_body_bytes=args.max_body,
    )


def api_key(given: str | None, file: Any, environment: str | None) -> str | None:
    """The first key of: the option, a file's content, the environment.

    Raises BlockpoolError, whose text has no key.
    """
    key = _text_of(file) if given is None and file is not None else given
    key = environment or None if key is None else key
    if key is not None:
        _check_plain(key)
    return key


def named_keys(text: str) -> tuple[tuple[str, str], ...]:
    """(name, key) of each line `name:key` or `name:key:admin`; none for a text that is one key.

    A key may have colons itself. Raises BlockpoolError, whose text has no key.
    """
    split = [line.partition(":")[::2] for line in _lines_of(text)]
    if len(split) < 2 and not all(KEY_NAME.fullmatch(name) and key for name, key in split):
        return ()
    found = [(name, key.removesuffix(ADMIN_MARK)) for name, key in split]
    for number, (name, key) in enumerate(found, 1):
        if not KEY_NAME.fullmatch(name):
            raise BlockpoolError(
                f"Key {number} of --api-key-file has no name. Write name:key, the name in "
                "letters, digits, . _ -"
            )
        _check_plain(key)
    if len({key for _, key in found}) < len(found):
        raise BlockpoolError(
            "Two keys of --api-key-file are the same. Give each name a key of its own."
        )
    return tuple(found)


def admin_keys(text: str) -> tuple[str, ...]:
    """The keys of the lines that end with `:admin`.

    The `admin` of `name:admin` is a key, not this mark.
    """
    keys = (line.partition(":")[2] for line in _lines_of(text))
    return tuple(key.removesuffix(ADMIN_MARK) for key in keys if key.endswith(ADMIN_MARK))


def _lines_of(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def _text_of(file: Any) -> str:
    try:
        return str(file.read_text(encoding="utf-8").strip())
    except (OSError, UnicodeError) as error:
        raise BlockpoolError(
            f"--api-key-file {file} cannot be read: {type(error).__name__}. Give a text file with "
            "a key."
        ) from None


def _check_plain(key: str) -> None:
    if not (key.isascii() and key.isprintable() and key.strip() == key and key):
        raise BlockpoolError(
            "The API key is empty, or has spaces around it or other characters than ASCII. Choose "
            "another one."
        )
