"""Starts the server: mlx-lm's own main(), with our options, provider, generator and handler in place of its own."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import time
import types
from collections.abc import Callable, Sequence
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

from ..config import (
    DECODE_PATHS,
    WHAT_FITS,
    EngineConfig,
    GuardConfig,
    ImageConfig,
    ModelsConfig,
    PoolConfig,
    PromptConfig,
    StoreConfig,
    parse_bytes,
    parse_seconds,
)
from ..demo import model_path
from ..errors import BlockpoolError
from ..mlx_lm_compat import rebind, run_http_server, server_main
from ..plugins import make_plugin_manager
from .access import ANY_ORIGIN, AccessPolicy, add_safety_options, guard_config
from .agents.warm_up import WarmUp, read_prompts
from .ending import end_on_signals
from .generator import BlockpoolGenerator
from .health import Watchdog
from .http import BlockpoolHandler
from .models.catalog import Catalog
from .models.inspection import inspect
from .models.provider import BlockpoolModelProvider
from .normalise import Normalisers

# A process that stops waits so long for the responses that say why requests have ended.
LAST_WORDS_SECONDS = 0.5


class BlockpoolHTTPServer(ThreadingHTTPServer):
    """A thread for each connection, and room for a burst of them to wait for theirs."""

    request_queue_size = GuardConfig.backlog
    daemon_threads = True

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start the connection's thread, and give it a moment: a hundred that parse at once would hold up a decode step."""
        super().process_request(request, client_address)
        time.sleep(ACCEPT_SECONDS)


# The least time between two connections that are accepted.
ACCEPT_SECONDS = 0.002
# How long a Python thread goes on while others wait.
SWITCH_SECONDS = 0.001


def main(argv: Sequence[str] | None = None) -> int:
    """Serve with mlx-lm's options and ours; `argv` without the program's name. Returns when the server has stopped."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    names: dict[str, Any] = {
        "argparse": _argparse_with(arguments),
        "ModelProvider": BlockpoolModelProvider,
        "run": run,
    }
    if "_run_cache_backend" in server_main.__globals__:
        # A patched mlx-lm, which has chosen its backend by now.
        names["_run_cache_backend"] = lambda parser: None
    try:
        rebind(server_main, **names)()
    except BlockpoolError as error:
        print(f"mlx-blockpool: {error}", file=sys.stderr)
        return _leave(1)
    return _leave(0)


def run(host: str, port: int, model_provider: BlockpoolModelProvider, **http: Any) -> None:
    """Serve until interrupted or terminated. `http` goes to mlx-lm's server, as server_class does.

    Raises BlockpoolError if the model cannot be loaded or the port not be had. The generation thread has ended in any case.
    """
    try:
        AccessPolicy(guard_config(model_provider.cli_args)).check_bind()
    except OSError as error:
        raise BlockpoolError(f"Cannot listen on {host}, port {port}: {error}. Choose another --host.") from error
    # As long as nothing is open there is nothing to end in order, also in the middle of a download.
    signal.signal(signal.SIGTERM, lambda *_: _leave(0))
    look_at_default(model_provider)
    # Python's threads take turns: a decode step waits for less of those that read requests.
    sys.setswitchinterval(SWITCH_SECONDS)
    generator = None
    try:
        # From here on a signal may come between any two lines.
        end_on_signals(EngineConfig.exit_seconds)
        generator = make_generator(model_provider)
        begin_watch(generator)
        generator.wait_until_loaded()
        http = {"server_class": BlockpoolHTTPServer, **http}
        run_http_server(host, port, generator, handler_class=BlockpoolHandler, **http)
    except KeyboardInterrupt:
        logging.info("Stopped before the server had started.")
    except OSError as error:
        raise BlockpoolError(f"Cannot listen on {host}, port {port}: {error}. Choose another --port or --host.") from error
    finally:
        if generator is not None:
            generator.stop_and_join()
            generator.guard.wait_until_empty(LAST_WORDS_SECONDS)
    logging.info("Server stopped.")


def begin_watch(generator: BlockpoolGenerator) -> None:
    """End the process where its generation thread hangs for too long."""
    Watchdog(lambda: generator.health.seconds_stalled(generator.has_waiting), EngineConfig.end_seconds).start()


def look_at_default(model_provider: BlockpoolModelProvider) -> None:
    """Check the files of the model that is to be served, and download them where they are not there.

    Raises BlockpoolError if it cannot be served.
    """
    config = _models_config(model_provider.cli_args)
    catalog = Catalog(model_provider, config)
    if catalog.default is None:
        return
    try:
        inspect(catalog.default, catalog, config, model_provider.cli_args.trust_remote_code)
    except BlockpoolError as error:
        raise BlockpoolError(f"Cannot serve {model_provider.cli_args.model}: {error}") from error


def make_generator(model_provider: BlockpoolModelProvider) -> BlockpoolGenerator:
    """The running generation thread of one server."""
    args = model_provider.cli_args
    engine = EngineConfig(
        prefill_tokens=args.prefill_step_size,
        prefill_rows=args.prompt_concurrency,
        decode_share=args.decode_share,
        max_members=args.decode_concurrency,
        max_positions=args.max_positions,
        wired_bytes=args.wired_limit,
    )
    store = _store_config(args)
    try:
        normalisers = Normalisers(make_plugin_manager(), args.normalise)
    except ValueError as error:
        raise BlockpoolError(f"--normalise: {error}") from error
    for description in normalisers.descriptions():
        logging.info("prompts are normalised by %s (--normalise none: by nothing)", description)
    guard = AccessPolicy(guard_config(args))
    prompts = {} if args.warm_up is None else read_prompts(args.warm_up)
    generator = BlockpoolGenerator(
        model_provider,
        engine,
        _pool_config(args),
        store,
        normalisers,
        _models_config(args),
        guard,
        prompts=PromptConfig(template_kwargs=args.allow_template_kwargs),
        images=ImageConfig(args.allow_image_hosts),
    )
    generator.registry.catalog.log_names()
    generator.warm_up = WarmUp(generator, prompts) if prompts else None
    return generator


def _pool_config(args: Any) -> PoolConfig:
    return PoolConfig(
        args.pool_bytes or args.prompt_cache_bytes,
        args.preallocate,
        decode_path=args.decode_path,
        agent_bytes=args.agent_bytes,
        anonymous_bytes=args.anonymous_bytes,
    )


def _store_config(args: Any) -> StoreConfig | None:
    """None: nothing is kept on disk."""
    if args.no_store:
        return None
    return StoreConfig(args.store_dir, args.store_bytes, args.store_bits, model_bytes=args.store_model_bytes)


def _models_config(args: Any) -> ModelsConfig:
    return ModelsConfig(
        max_models=args.max_models,
        patience_seconds=args.swap_patience,
        idle_seconds=args.idle_unload,
        allowed=args.allow_models,
        downloads=args.allow_downloads,
        aliases=args.model_aliases,
    )


def _leave(status: int) -> int:
    """End the process here: with its threads gone, mlx 0.32 aborts when the interpreter takes it down."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _argparse_with(arguments: list[str]) -> types.SimpleNamespace:
    """argparse as mlx-lm's main sees it: its parser takes our options too and parses `arguments`."""

    class Parser(argparse.ArgumentParser):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(prog="mlx-blockpool serve", description="mlx-lm's server on a block pool.")

        def add_argument(self, *names: Any, **options: Any) -> Any:
            return super().add_argument(*names, **{**options, **CHANGED_OPTIONS.get(names[0], {})})

        def parse_args(self, *_: Any, **__: Any) -> Any:
            _add_options(self.add_argument_group("block pool").add_argument)
            limits = self.add_argument_group("what a model may use").add_argument
            _add_memory_options(limits)
            _add_wired_option(limits)
            _add_keeping_options(self.add_argument_group("what is kept for whom").add_argument)
            _add_agent_options(self.add_argument_group("agents").add_argument)
            _add_model_options(self.add_argument_group("models").add_argument)
            add_safety_options(self.add_argument_group("safety").add_argument)
            self.set_defaults(prefill_step_size=EngineConfig.prefill_tokens, allowed_origins=ANY_ORIGIN)
            args = super().parse_args(arguments)
            args.model = args.model and model_path(args.model)
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
    add(
        "--normalise",
        type=lambda text: [name for name in text.split(",") if name],
        default=[],
        metavar="NAMES",
        help="Normalisers for volatile parts of prompts, such as bookkeeping,date,replay, beside vendor-header, which is on; "
        "with none only those named. A request chooses others with the header X-Normalise",
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


def _add_keeping_options(add: Callable[..., Any]) -> None:
    add(
        "--agent-bytes",
        type=parse_bytes,
        metavar="SIZE",
        help="The most that the prefixes which one agent has brought in may take of the pool (default: no limit but the pool's)",
    )
    add(
        "--anonymous-bytes",
        type=parse_bytes,
        metavar="SIZE",
        help="The same for all requests together that name no agent (default: no limit but the pool's)",
    )
    add(
        "--store-model-bytes",
        type=parse_bytes,
        metavar="SIZE",
        help="The most that one model's records may take of --store-bytes (default: all of it)",
    )


def _add_memory_options(add: Callable[..., Any]) -> None:
    add(
        "--max-positions",
        type=_positions,
        metavar="N",
        help="The most tokens of a prompt and its reply, in place of what a model's config.json says; off: no such limit",
    )


def _add_wired_option(add: Callable[..., Any]) -> None:
    add(
        "--wired-limit",
        type=_wired,
        metavar="SIZE",
        help="What macOS must not page out while replies are generated; auto: what the device recommends, as mlx-lm does "
        "(default); off: leave the limit alone",
    )


def _add_agent_options(add: Callable[..., Any]) -> None:
    add(
        "--warm-up",
        type=Path,
        metavar="FILE",
        help='Compute prompts at the start: each line of FILE is a chat\'s body, {"prompt": "text"} or a text in quotes, as JSON',
    )


def _add_model_options(add: Callable[..., Any]) -> None:
    add(
        "--max-models",
        type=_count,
        default=ModelsConfig.max_models,
        metavar="N",
        help="Keep up to N models loaded, each with an Nth of --pool-bytes; the one used longest ago goes first (default: 1)",
    )
    add(
        "--swap-patience",
        type=_seconds,
        default=ModelsConfig.patience_seconds,
        metavar="TIME",
        help="How long requests for another model let those for a loaded one pass, such as 30s (default: 30s)",
    )
    add(
        "--idle-unload",
        type=_seconds,
        metavar="TIME",
        help="Unload a model that nobody asked for so long, such as 15m; the next request loads it again (default: never)",
    )
    add(
        "--allow-models",
        type=lambda text: tuple(name for name in text.split(",") if name),
        metavar="NAMES",
        help="Folders, folders of models and hub ids that requests may name beside --model, separated by commas "
        "(default: what is downloaded)",
    )
    add("--allow-downloads", action="store_true", help="Let requests have models downloaded from the hub")
    add(
        "--model-aliases",
        type=_aliases,
        metavar="NAMES",
        help="Other names for models, as NAME=MODEL,..; off: none. Default: where one model is served it also answers to names "
        "that nobody knows, such as sonnet or gpt-4o",
    )


def _most_tokens(text: str) -> int:
    return WHAT_FITS if text == "auto" else _count(text)


def _aliases(text: str) -> tuple[tuple[str, str], ...]:
    """'sonnet=some/model,..', or off."""
    pairs = [] if text == "off" else [part.partition("=") for part in text.split(",") if part]
    if not all(name and model for name, _, model in pairs):
        raise argparse.ArgumentTypeError(f"{text} is neither off nor NAME=MODEL,..")
    return tuple((name, model) for name, _, model in pairs)


def _positions(text: str) -> int:
    return 0 if text == "off" else _count(text)


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text} is not a number from 1")
    return int(text)


def _seconds(text: str) -> float:
    try:
        return parse_seconds(text)
    except BlockpoolError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _share(text: str) -> float:
    share = float(text)
    if not 0 <= share <= 0.95:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 0.95")
    return share


def _wired(text: str) -> int | None:
    return 0 if text == "off" else _size(text)


def _size(text: str) -> int | None:
    return None if text == "auto" else parse_bytes(text)


# What mlx-lm's own options are here.
CHANGED_OPTIONS: dict[str, dict[str, Any]] = {
    "--max-tokens": {
        "type": _most_tokens,
        "default": WHAT_FITS,
        "metavar": "N",
        "help": "Tokens of a reply whose request names no limit; auto: as many as the model and the pool have room for (default)",
    },
}
