"""The parser of the mlx-blockpool command.

Each module in commands/ adds the options of one subcommand and runs it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from . import __version__
from .commands import agents, launch, patch, plan, plugin, service, store, top, transfer
from .commands.doctor import command as doctor
from .errors import BlockpoolError
from .model_files.device import mlx_problem


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand. Exit status 0, or 1 after a BlockpoolError or without mlx, which is
    printed without a traceback.

    `run` of a subcommand returns the text to print, and the exit status if that is not 0.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    parser = _parser()
    own, passed_on = arguments, []
    if arguments[:1] == ["serve"]:
        own = arguments[:1]
    elif arguments[:1] in (["launch"], ["service"]) and "--" in arguments:
        end = arguments.index("--")
        own, passed_on = arguments[:end], arguments[end + 1 :]
    args, rest = parser.parse_known_args(own)
    args.rest = passed_on
    try:
        if args.command == "serve":
            from .server.options import parse

            options = parse(arguments[1:])
            # Importing mlx and mlx-lm takes a second, which no wrong option has to wait for.
            from .server.app import serve

            return serve(options)
        if rest:
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        answer = args.run(args)
        text, status = answer if isinstance(answer, tuple) else (answer, 0)
        print(text)
    except BlockpoolError as error:
        print(f"mlx-blockpool: {error}", file=sys.stderr)
        return 1
    except ImportError:
        problem = mlx_problem()
        if problem is None:
            raise
        print(f"mlx-blockpool: {' '.join(problem)}", file=sys.stderr)
        return 1
    return int(status)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlx-blockpool", description="A block-pool KV cache for mlx-lm."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser(
        "serve", add_help=False, help="mlx-lm's server on a block pool; --help lists its options"
    )
    for name, module, about in (
        ("launch", launch, "start a coding client, and the server if none runs"),
        ("service", service, "run the server in the background from login on"),
        ("patch", patch, "add the option --cache-backend to mlx_lm.server, or remove it"),
        ("plan", plan, "the memory that a model and its agents need, before it is downloaded"),
        ("top", top, "a running server's memory, agents and requests in the terminal"),
        ("doctor", doctor, "check whether the server will run well here, and what to do if not"),
        ("plugin", plugin, "begin a package for a model that mlx-lm does not have"),
    ):
        module.add_options(commands.add_parser(name, help=about))
    text = "the prefixes on disk: show, check and clear them, export and import"
    actions = store.add_options(commands.add_parser("store", help=text))
    agents.add_options(actions)
    transfer.add_options(actions)
    return parser


if __name__ == "__main__":
    sys.exit(main())
