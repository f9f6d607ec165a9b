"""Starts the server: mlx-lm's own main(), with our options, provider, generator and handler in place of its own."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import signal
import sys
import time
import types
from collections.abc import Callable, Sequence
from http.server import ThreadingHTTPServer
from typing import Any

import mlx.core as mx
from mlx_lm.utils import maybe_set_recommended_wired_limit

from ..config import AccessConfig, EngineConfig, RankConfig
from ..demo import model_path
from ..errors import BlockpoolError, GroupError
from ..mlx_lm_compat import main as server_main
from ..mlx_lm_compat import rebind, run_http_server
from ..plugins import make_plugin_manager
from . import options
from .access import AccessPolicy
from .agents.warm_up import WarmUp, read_prompts
from .ending import end_on_signals
from .generator import BlockpoolGenerator
from .health import Watchdog
from .http import BlockpoolHandler
from .live.kv_events import KVPublisher
from .live.snapshot import held
from .models.catalog import Catalog
from .models.inspection import inspect
from .models.provider import BlockpoolModelProvider
from .normalise import Normalisers
from .prompts.workers import fork_server
from .ranked.follower import follow
from .terminal import Bars, first_words

# How long a stopping process waits for the responses that say why requests have ended.
LAST_WORDS_SECONDS = 0.5
# The least time between two connections that are accepted.
ACCEPT_SECONDS = 0.002
# How long a Python thread runs while others wait.
SWITCH_SECONDS = 0.001


class BlockpoolHTTPServer(ThreadingHTTPServer):
    """A thread for each connection, and a queue for bursts of new ones."""

    request_queue_size = AccessConfig.backlog
    daemon_threads = True
    # Called once the server listens, with the port and what stops the server.
    listening: Callable[[int, Callable[[], None]], None] | None = None

    def server_activate(self) -> None:
        super().server_activate()
        if self.listening is not None:
            self.listening(self.server_address[1], self.shutdown)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start the connection's thread, and give it a moment: a hundred that parse at once would hold up a decode step."""
        super().process_request(request, client_address)
        time.sleep(ACCEPT_SECONDS)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve with mlx-lm's options and ours; `argv` without the program's name. Returns when the server has stopped."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    # What was imported is no garbage: collections, of which a load makes some, are the shorter without it.
    gc.freeze()
    names: dict[str, Any] = {"argparse": _argparse_with(arguments), "ModelProvider": BlockpoolModelProvider, "run": run_rank}
    names["maybe_set_recommended_wired_limit"] = _open_device
    if "_run_cache_backend" in server_main.__globals__:
        # A patched mlx-lm has chosen its backend by now.
        names["_run_cache_backend"] = lambda parser: None
    try:
        rebind(server_main, **names)()
    except BlockpoolError as error:
        print(f"mlx-blockpool: {error}", file=sys.stderr)
        return _leave(1)
    return _leave(0)


def _open_device() -> int | None:
    """mlx-lm's first use of the device, and before it the fork of the prompt workers, which have no device and no connections."""
    fork_server().start_here()
    _join()
    return maybe_set_recommended_wired_limit()  # type: ignore[no-any-return]


def _join() -> None:
    """Wait for the other ranks, if there are any. Ctrl-C ends the process meanwhile: nothing is open yet."""
    usual = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        mx.distributed.init()
    except (RuntimeError, ValueError) as error:
        hint = "Start every rank, with the same file of hosts."
        raise GroupError(f"The other ranks cannot be reached: {error}. {hint}") from error
    finally:
        signal.signal(signal.SIGINT, usual)


def run_rank(host: str, port: int, model_provider: BlockpoolModelProvider, **http: Any) -> None:
    """run() on rank 0, or follow() on another one of a group. Raises BlockpoolError as they do."""
    if model_provider.ranks.rank == 0:
        run(host, port, model_provider, **http)
    else:
        check_default(model_provider)
        follow(model_provider, options.server_config(model_provider.cli_args))


def run(host: str, port: int, model_provider: BlockpoolModelProvider, **http: Any) -> None:
    """Serve until interrupted or terminated, and end the generation thread. `http`: arguments of mlx-lm's server.

    Raises BlockpoolError if the model cannot be loaded or the port cannot be opened.
    """
    try:
        AccessPolicy(options.access_config(model_provider.cli_args)).check_bind()
    except OSError as error:
        raise BlockpoolError(f"Cannot listen on {host}, port {port}: {error}. Choose another --host.") from error
    # Nothing is open yet that would have to be closed, also in the middle of a download.
    signal.signal(signal.SIGTERM, lambda *_: _leave(0))
    check_default(model_provider)
    # Shorter turns of the threads that read requests delay a decode step less.
    sys.setswitchinterval(SWITCH_SECONDS)
    generator = bars = None
    try:
        # From here on a signal may arrive between any two lines.
        end_on_signals(EngineConfig.exit_seconds, hang_up=model_provider.ranks.size > 1)
        generator = make_generator(model_provider)
        # Ends the process if its generation thread hangs. A group reads a model in one turn.
        most = EngineConfig.end_seconds if model_provider.ranks.size == 1 else RankConfig.load_seconds
        Watchdog(lambda: generator.health.seconds_stalled(generator.has_waiting), most).start()
        bars = Bars(generator)
        bars.start()
        generator.wait_until_loaded()
        http = {"server_class": _server_class(generator, host), **http}
        run_http_server(host, port, generator, handler_class=BlockpoolHandler, **http)
    except KeyboardInterrupt:
        logging.info("Stopped before the server had started.")
    except OSError as error:
        raise BlockpoolError(f"Cannot listen on {host}, port {port}: {error}. Choose another --port or --host.") from error
    finally:
        if bars is not None:
            bars.stop()
        if generator is not None:
            generator.stop_and_join()
            generator.access.wait_until_empty(LAST_WORDS_SECONDS)
            if generator.kv_events is not None:
                generator.kv_events.join(LAST_WORDS_SECONDS)
    logging.info("Server stopped.")


def _server_class(generator: BlockpoolGenerator, host: str) -> type[BlockpoolHTTPServer]:
    """A server that logs its first words once it listens, and stops when another rank asks for it."""

    def greet(port: int, stop: Callable[[], None]) -> None:
        generator.turns.stop = stop
        logging.info("%s", first_words(generator, host, port))

    return type("BlockpoolHTTPServer", (BlockpoolHTTPServer,), {"listening": staticmethod(greet)})


def check_default(model_provider: BlockpoolModelProvider) -> None:
    """Check the files of the default model, and download missing ones. Raises BlockpoolError if it cannot be served."""
    args = model_provider.cli_args
    config = options.server_config(args).models
    catalog = Catalog(model_provider, config)
    try:
        if catalog.default is not None:
            inspect(catalog.default, catalog, config, args.trust_remote_code)
    except BlockpoolError as error:
        raise BlockpoolError(f"Cannot serve {args.model}: {error}") from error


def make_generator(model_provider: BlockpoolModelProvider) -> BlockpoolGenerator:
    """The running generation thread of one server."""
    args = model_provider.cli_args
    try:
        normalisers = Normalisers(make_plugin_manager(), args.normalise)
    except ValueError as error:
        raise BlockpoolError(f"--normalise: {error}") from error
    for description in normalisers.descriptions():
        logging.info("prompts are normalised by %s (--normalise none: by nothing)", description)
    for warning in options.warnings(args):
        logging.warning("%s", warning)
    prompts = {} if args.warm_up is None else read_prompts(args.warm_up)
    config = options.server_config(args)
    publisher = None if config.kv_events is None else KVPublisher(config.kv_events)
    generator = BlockpoolGenerator(model_provider, config, normalisers)
    generator.registry.catalog.log_names()
    if publisher is not None:
        generator.kv_events = publisher.start(generator.registry.log, lambda: held(generator))
    generator.warm_up = WarmUp(generator, prompts) if prompts else None
    return generator


def _leave(status: int) -> int:
    """End the process without the interpreter's own end, at which mlx 0.32 aborts once its threads are gone."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _argparse_with(arguments: list[str]) -> types.SimpleNamespace:
    """argparse as mlx-lm's main sees it: its parser has our options too, and parses `arguments`."""

    class Parser(argparse.ArgumentParser):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(prog="mlx-blockpool serve", description="mlx-lm's server on a block pool.")

        def add_argument(self, *names: Any, **given: Any) -> Any:
            return super().add_argument(*names, **{**given, **options.CHANGED_OPTIONS.get(names[0], {})})

        def parse_args(self, *_: Any, **__: Any) -> Any:
            options.add_options(self)
            args = super().parse_args(arguments)
            args.model = args.model and model_path(args.model)
            return args

    return types.SimpleNamespace(**{**vars(argparse), "ArgumentParser": Parser})
