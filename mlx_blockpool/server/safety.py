"""The options that say whom the server lets in."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..config import GuardConfig, parse_bytes
from ..errors import BlockpoolError
from .guard import api_key, named_keys, names_in, text_of

# mlx-lm's default of --allowed-origins, told from the same one that somebody has given.
ANY_ORIGIN = ("*",)


def add_safety_options(add: Callable[..., Any]) -> None:
    """Add them to a parser's group."""
    _add_key_options(add)
    add("--allow-remote", action="store_true", help="Listen on other addresses than this machine's own without a key")
    add(
        "--allow-hosts",
        type=names_in,
        default=(),
        metavar="NAMES",
        help="Names under which clients reach this server, separated by commas (default: localhost, where --host is that)",
    )
    add(
        "--max-body",
        type=parse_bytes,
        default=GuardConfig.max_body_bytes,
        metavar="SIZE",
        help="The largest request that is read, such as 64MB (default: 16 MiB)",
    )
    add(
        "--allow-template-kwargs",
        type=lambda text: None if text.strip() == "any" else tuple(name.strip() for name in text.split(",")),
        default=(),
        metavar="NAMES",
        help="What a request's chat_template_kwargs may hold beside the switches that templates are known to read, separated by "
        "commas, or any; chat_template lets requests bring templates of their own (default: none)",
    )
    add(
        "--allow-image-hosts",
        type=names_in,
        default=(),
        metavar="NAMES",
        help="Hosts from which images that requests name are fetched, separated by commas, for models that take images "
        "(default: none; images come as data URLs)",
    )


def _add_key_options(add: Callable[..., Any]) -> None:
    add(
        "--api-key",
        metavar="KEY",
        help="Answer only who shows this key as a bearer token or x-api-key; other users of this machine may see it in the list "
        "of processes, not so that of --api-key-file and of MLX_BLOCKPOOL_API_KEY",
    )
    add("--api-key-file", type=Path, metavar="FILE", help="A file that holds the key, or several keys as lines name:key")
    add(
        "--private-prefixes",
        action="store_true",
        help="Share no prefixes between the names of --api-key-file: neither times nor cached tokens tell of others' prompts",
    )


def guard_config(args: Any) -> GuardConfig:
    """Whom these options let in. Raises BlockpoolError for a key that cannot be one."""
    # A list is what somebody has asked for.
    origins = () if args.allowed_origins is ANY_ORIGIN else tuple(args.allowed_origins)
    keys = () if args.api_key is not None or args.api_key_file is None else named_keys(text_of(args.api_key_file))
    key = None if keys else api_key(args.api_key, args.api_key_file, os.environ.get("MLX_BLOCKPOOL_API_KEY"))
    if args.private_prefixes and not keys:
        raise BlockpoolError("--private-prefixes needs keys with names. Give --api-key-file a file with lines name:key.")
    config = GuardConfig(args.host, key, keys, args.private_prefixes)
    return replace(
        config,
        allow_remote=args.allow_remote,
        allowed_hosts=args.allow_hosts,
        allowed_origins=origins,
        max_body_bytes=args.max_body,
    )
