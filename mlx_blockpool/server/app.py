"""Starts the server: mlx-lm's own main(), with our options, provider, generator and handler in place of its own."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mlx_lm import server

from ..config import DECODE_PATHS, EngineConfig, PoolConfig, StoreConfig, parse_bytes
from ..demo import model_path
from ..errors import BlockpoolError
from ..upstream import rebind
from .generation import BlockpoolGenerator
from .handler import BlockpoolHandler
from .prompt_cache import ServerPromptCache
from .provider import BlockpoolModelProvider


def main(argv: Sequence[str] | None = None) -> int:
    """Serve with mlx-lm's options and ours; `argv` without the program's name. Returns when the server has stopped."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    names: dict[str, Any] = {
        "argparse": _argparse_with(arguments),
        "ModelProvider": BlockpoolModelProvider,
        "run": run,
    }
    if hasattr(server, "_run_cache_backend"):
        # A patched mlx-lm, which has chosen its backend by now.
        names["_run_cache_backend"] = lambda parser: None
    try:
        rebind(server.main, **names)()
    except BlockpoolError as error:
        print(f"mlx-blockpool: {error}", file=sys.stderr)
        return _leave(1)
    return _leave(0)


def run(host: str, port: int, model_provider: BlockpoolModelProvider, **http: Any) -> None:
    """Serve until interrupted or terminated. `http` goes to mlx-lm's server, as server_class does.

    Raises BlockpoolError if the model cannot be loaded or the port not be had. The generation thread has ended in any case.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    generator = make_generator(model_provider)
    try:
        generator.wait_until_loaded()
        server._run_http_server(host, port, generator, handler_class=BlockpoolHandler, **http)
    except KeyboardInterrupt:
        logging.info("Stopped before the server had started.")
    except OSError as error:
        raise BlockpoolError(f"Cannot listen on {host}, port {port}: {error}. Choose another --port or --host.") from error
    finally:
        generator.stop_and_join()
    logging.info("Server stopped.")


def make_generator(model_provider: BlockpoolModelProvider) -> BlockpoolGenerator:
    """The running generation thread of one server."""
    args = model_provider.cli_args
    pool = PoolConfig(args.pool_bytes or args.prompt_cache_bytes, args.preallocate, decode_path=args.decode_path)
    engine = EngineConfig(
        prefill_tokens=args.prefill_step_size,
        prefill_rows=args.prompt_concurrency,
        decode_share=args.decode_share,
        max_members=args.decode_concurrency,
    )
    store = None
    if not args.no_store:
        store = StoreConfig(args.store_dir, args.store_bytes, args.store_bits)
    return BlockpoolGenerator(model_provider, ServerPromptCache(args, pool, store), engine)


def _leave(status: int) -> int:
    """End the process here: with its threads gone, mlx 0.32 aborts when the interpreter takes it down."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def _argparse_with(arguments: list[str]) -> types.SimpleNamespace:
    """argparse as mlx-lm's main sees it: its parser takes our options too and parses `arguments`."""

    class Parser(argparse.ArgumentParser):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(prog="mlx-blockpool serve", description="mlx-lm's server on a block pool.")

        def parse_args(self, *_: Any, **__: Any) -> Any:
            _add_options(self.add_argument_group("block pool").add_argument)
            self.set_defaults(prefill_step_size=EngineConfig.prefill_tokens)
            args = super().parse_args(arguments)
            if args.model == "demo":
                args.model = model_path()
            return args

    return types.SimpleNamespace(**{**vars(argparse), "ArgumentParser": Parser})


def _add_options(add: Callable[..., Any]) -> None:
    add(
        "--pool-bytes",
        type=_size,
        metavar="SIZE",
        help="Hard limit for keys and values in memory, such as 4GB; auto: half of what the model leaves free (default)",
    )
    add("--preallocate", action="store_true", help="Take the whole pool at start instead of slab by slab")
    add(
        "--decode-share",
        type=_share,
        default=EngineConfig.decode_share,
        metavar="SHARE",
        help="Part of the time that running replies get while long prompts are computed, 0 to 0.95 (default: %(default)s)",
    )
    add(
        "--decode-path",
        choices=DECODE_PATHS,
        default=PoolConfig.decode_path,
        help="How a batch reads its keys and values; auto: by a measured rule (default)",
    )
    add("--no-store", action="store_true", help="Keep nothing on disk")
    add("--store-dir", type=Path, metavar="DIR", help="Where prefixes are kept on disk (default: the user's cache folder)")
    add(
        "--store-bytes",
        type=parse_bytes,
        default=StoreConfig.store_bytes,
        metavar="SIZE",
        help="Hard limit for what is kept on disk, such as 20GB (default: 20 GB)",
    )
    add("--store-bits", type=int, choices=(4, 8), help="Quantise what is kept on disk (default: as it is in memory)")


def _share(text: str) -> float:
    share = float(text)
    if not 0 <= share <= 0.95:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 0.95")
    return share


def _size(text: str) -> int | None:
    return None if text == "auto" else parse_bytes(text)
