"""Starts the server: mlx-lm's main() with our options, provider, generator and handler."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import signal
import socket
import sys
import time
import types
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from http.server import ThreadingHTTPServer
from typing import Any

import mlx.core as mx
from mlx_lm.utils import maybe_set_recommended_wired_limit

from ..config import AccessConfig, EngineConfig
from ..demo import NAME
from ..errors import BlockpoolError, GroupError
from ..formatting import client_settings, count, human_bytes, nearest
from ..mlx_lm_compat import main as server_main
from ..mlx_lm_compat import rebind, run_http_server
from ..plugins import installed_plugins
from ..store.paths import check_usable, default_folder
from . import options
from .access import AccessPolicy
from .ending import end_on_signals
from .generator import LAST_WORDS_SECONDS, BlockpoolGenerator
from .health import Watchdog
from .http import BlockpoolHandler
from .model import LoadedModel
from .models.catalog import Catalog
from .models.inspection import inspect
from .normalise import Normalisers
from .prompts.workers import FORKS, fork_server
from .provider import BlockpoolModelProvider
from .ranked.ending import RankLauncher
from .ranked.leader import step_driver
from .ranked.replica import follow, join_group
from .watch.kv_events import KVPublisher
from .watch.snapshot import stored_blocks

# The least time between two connections that are accepted.
ACCEPT_SECONDS = 0.002
# How long a Python thread may run while others wait.
SWITCH_SECONDS = 0.001
# Addresses that stand for all of this machine's.
ANYWHERE = ("", "0.0.0.0", "::")


class BlockpoolHTTPServer(ThreadingHTTPServer):
    """A thread for each connection, and a queue for bursts of new ones."""

    request_queue_size = AccessConfig.backlog
    daemon_threads = True
    # Called after mlx-lm's own log of the start, with the port and what stops the server.
    listening: Callable[[int, Callable[[], None]], None] | None = None
    # A socket that has the address already.
    bound: socket.socket | None = None

    def server_bind(self) -> None:
        if self.bound is None:
            super().server_bind()
        else:
            self.socket.close()
            self.socket = self.bound
            self.server_address = self.socket.getsockname()
            self.server_name, self.server_port = self.socket.getsockname()[:2]

    def serve_forever(self, poll_interval: float = 0.5) -> None:
        try:
            if self.listening is not None:
                self.listening(self.server_address[1], self.shutdown)
        except KeyboardInterrupt:
            # mlx-lm would call shutdown(), which waits for a loop that has not begun.
            return
        super().serve_forever(poll_interval)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start the connection's thread, and pause: a hundred threads that parse at once would
        delay a decode step.
        """
        super().process_request(request, client_address)
        time.sleep(ACCEPT_SECONDS)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve with mlx-lm's options and ours; `argv` without the program's name.

    Returns when the server has stopped.
    """
    try:
        args = options.parse(sys.argv[1:] if argv is None else argv)
    except BlockpoolError as error:
        print(f"mlx-blockpool: error: {error}", file=sys.stderr)
        return _leave(2)
    return serve(args)


def serve(args: argparse.Namespace) -> int:
    """Serve with what options.parse() has found. Returns when the server has stopped."""
    # Imported modules are not garbage. Without them the collections during a load are shorter.
    gc.freeze()
    gc.enable()
    if FORKS:
        # Before there are threads.
        fork_server().fork()
    names: dict[str, Any] = {"argparse": parsed(args), "ModelProvider": BlockpoolModelProvider}
    names["run"] = partial(run_rank, launcher=RankLauncher())
    names["maybe_set_recommended_wired_limit"] = _open_device
    if "_run_cache_backend" in server_main.__globals__:
        # A patched mlx-lm has chosen its backend by now.
        names["_run_cache_backend"] = lambda parser: None
    try:
        rebind(server_main, **names)()
    except BlockpoolError as error:
        print(f"mlx-blockpool: error: {error}", file=sys.stderr)
        return _leave(2)
    return _leave(0)


def _open_device() -> int | None:
    """mlx-lm's first use of the device, once all ranks have met.

    Ctrl-C ends the process meanwhile: nothing is open.
    """
    usual = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        mx.distributed.init()
    except (RuntimeError, ValueError) as error:
        hint = "Start every rank, with the same file of hosts."
        raise GroupError(f"The other ranks cannot be reached: {error}. {hint}") from error
    finally:
        signal.signal(signal.SIGINT, usual)
    return maybe_set_recommended_wired_limit()  # type: ignore[no-any-return]


def run_rank(
    host: str,
    port: int,
    model_provider: BlockpoolModelProvider,
    launcher: RankLauncher,
    **http: Any,
) -> None:
    """run() on rank 0, or follow() on another one of a group.

    Raises BlockpoolError as they do, or if the store is unusable.
    """
    config = options.server_config(model_provider.cli_args)
    if config.store is not None:
        check_usable(config.store.folder or default_folder())
    join_group(model_provider, launcher)
    if model_provider.ranks.rank == 0:
        run(host, port, model_provider, **http)
    else:
        check_default(model_provider)
        follow(model_provider, config)


def run(host: str, port: int, model_provider: BlockpoolModelProvider, **http: Any) -> None:
    """Serve until interrupted or terminated, and end the generation thread. `http`: arguments of
    mlx-lm's server.

    Raises BlockpoolError if the model cannot be loaded or the port cannot be opened.
    """
    try:
        AccessPolicy(options.access_config(model_provider.cli_args)).check_bind()
    except OSError as error:
        raise BlockpoolError(
            f"Cannot listen on {host}, port {port}: {error}. Choose another --host."
        ) from error
    # Nothing has to be closed yet, also during a download.
    signal.signal(signal.SIGTERM, lambda *_: _leave(0))
    bound = bind(host, port)
    check_default(model_provider)
    # Shorter turns of the threads that read requests delay a decode step less.
    sys.setswitchinterval(SWITCH_SECONDS)
    generator = None
    try:
        # From here on a signal may arrive between any two lines.
        end_on_signals(EngineConfig.exit_seconds)
        generator = make_generator(model_provider)
        # Ends the process if its generation thread hangs.
        most = generator.step_driver.most_seconds
        Watchdog(lambda: generator.health.seconds_stalled(generator.has_waiting), most).start()
        generator.wait_until_loaded()
        http = {"server_class": _server_class(generator, host, bound), **http}
        run_http_server(host, port, generator, handler_class=BlockpoolHandler, **http)
    except KeyboardInterrupt:
        logging.info("Stopped before the server had started.")
    except OSError as error:
        raise _cannot_listen(host, port, error) from error
    finally:
        if generator is not None:
            generator.stop_and_join()
            generator.access.wait_until_empty(LAST_WORDS_SECONDS)
            if generator.kv_events is not None:
                generator.kv_events.join(LAST_WORDS_SECONDS)
    logging.info("Server stopped.")


def bind(host: str, port: int) -> socket.socket:
    """A socket that has this address before a model is loaded, and refuses connections until it
    listens. Raises BlockpoolError for an address that is in use or not of this machine.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        bound = socket.socket(family, socket.SOCK_STREAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        return bound
    except OSError as error:
        raise _cannot_listen(host, port, error) from error


def _cannot_listen(host: str, port: int, error: OSError) -> BlockpoolError:
    return BlockpoolError(
        f"Cannot listen on {host}, port {port}: {error}. Choose another --port or --host."
    )


def first_words(generator: BlockpoolGenerator, host: str, port: int) -> str:
    """The lines for the person who has started the server. `port`: the one on which it listens."""
    name = "127.0.0.1" if host in ANYWHERE else f"[{host}]" if ":" in host else host
    url, model = f"http://{name}:{port}", generator.model
    lines = [
        "The server is ready.",
        *_of_model(generator, model),
        _of_store(generator, model),
        f"  open   {url}/",
    ]
    key = "any" if generator.access.is_open else "KEY"
    lines += [f"  {client}: {line}" for client, line in client_settings(url, key).items()]
    return "\n".join(lines)


def _of_model(generator: BlockpoolGenerator, model: LoadedModel | None) -> list[str]:
    if model is None:
        return [f"  model  none yet. {generator.registry.catalog.choices()}"]
    id = generator.registry.catalog.id_of(model.key.model)
    pool = f"{human_bytes(model.pool_bytes)} for keys and values"
    return [
        f"  model  {id}, {human_bytes(model.weights_bytes)} of weights, with {model.how}",
        f"  pool   {pool}",
    ]


def _of_store(generator: BlockpoolGenerator, model: LoadedModel | None) -> str:
    config, files = generator.store_config, generator.agent_files
    if config is None or files is None:
        return "  store  none: cached prefixes end with the server"
    text = (
        f"  store  {config.folder or default_folder()}, {human_bytes(config.store_bytes)} at most"
    )
    namespace = None if model is None or model.agents is None else model.agents.namespace
    try:
        own = [agent for agent in files.all() if agent.namespace == namespace]
    except (BlockpoolError, OSError):
        own = []
    if not own:
        return f"{text}; it has nothing of this model" if model is not None else text
    return (
        f"{text}; on it {count(len(own), 'agent')} with "
        f"{count(sum(agent.tokens for agent in own), 'token')}"
    )


def _server_class(
    generator: BlockpoolGenerator, host: str, bound: socket.socket
) -> type[BlockpoolHTTPServer]:
    """A server on a `bound` socket that logs its greeting once it listens, and that another rank
    can stop.
    """

    def greet(port: int, stop: Callable[[], None]) -> None:
        generator.step_driver.stop = stop
        logging.info("%s", first_words(generator, host, port))

    own = {"listening": staticmethod(greet), "bound": bound}
    return type("BlockpoolHTTPServer", (BlockpoolHTTPServer,), own)


def check_default(model_provider: BlockpoolModelProvider) -> None:
    """Check the files of the default model, and download missing ones.

    Raises BlockpoolError if it cannot be served.
    """
    args = model_provider.cli_args
    config = options.server_config(args).models
    catalog = Catalog(model_provider, config)
    try:
        if catalog.default is not None:
            inspect(catalog.default, catalog, config, args.trust_remote_code)
    except BlockpoolError as error:
        wrong = (args.model, args.model.rpartition("/")[2])
        near = nearest(args.model, (n for n in (NAME, *catalog.listed()) if n not in wrong))
        why = f"{str(error).rstrip('.')}. {near}".rstrip()
        raise BlockpoolError(f"Cannot serve {args.model}: {why}") from error


def make_generator(model_provider: BlockpoolModelProvider) -> BlockpoolGenerator:
    """The running generation thread of one server."""
    args = model_provider.cli_args
    try:
        normalisers = Normalisers(installed_plugins(), args.normalise)
    except ValueError as error:
        raise BlockpoolError(f"--normalise: {error}") from error
    for description in normalisers.descriptions():
        logging.info("prompts are normalised by %s (--normalise none: by nothing)", description)
    for warning in options.warnings(args):
        logging.warning("%s", warning)
    prompts = {} if args.warm_up is None else _warm_up().read_prompts(args.warm_up)
    config = options.server_config(args)
    publisher = None if config.kv_events is None else KVPublisher(config.kv_events)
    generator = BlockpoolGenerator(model_provider, config, normalisers, step_driver)
    generator.registry.catalog.log_names()
    if publisher is not None:
        generator.kv_events = publisher.start(
            generator.registry.log, lambda: stored_blocks(generator)
        )
    generator.warm_up = _warm_up().WarmUp(generator, prompts) if prompts else None
    return generator


def _warm_up() -> types.ModuleType:
    """The module of an option that few servers have, and all protocols with it."""
    from .agents import warm_up

    return warm_up


def _leave(status: int) -> int:
    """End the process without the interpreter's own end, at which mlx 0.32 aborts once its
    threads are gone.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        # Their reader may have ended.
        with suppress(OSError):
            stream.flush()
    os._exit(status)


def parsed(args: argparse.Namespace) -> types.SimpleNamespace:
    """argparse as mlx-lm's main() sees it: its parser has found `args`."""
    parser = types.SimpleNamespace(add_argument=lambda *_, **__: None, parse_args=lambda: args)
    return types.SimpleNamespace(ArgumentParser=lambda **_: parser)
