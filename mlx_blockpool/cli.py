"""The parser of the mlx-blockpool command.

Each module in commands/ adds the options of one subcommand and runs it.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from . import __version__
from .errors import BlockpoolError
from .formatting import Parser
from .model_files.device import mlx_problem

COMMANDS = {
    "serve": "mlx-lm's server on a block pool; --help lists its options",
    "launch": "start a coding client, and the server if none runs",
    "models": "the downloaded models and whether they fit; downloads others",
    "demo": "five agents on the bundled model, and on mlx-lm's server to compare",
    "service": "run the server in the background from login on",
    "patch": "add the option --cache-backend to mlx_lm.server, or remove it",
    "plan": "the memory that a model and its agents need, before it is downloaded",
    "top": "a running server's memory, agents and requests in the terminal",
    "doctor": "check whether the server will run well here, and what to do if not",
    "plugin": "begin a package for a model that mlx-lm does not have",
    "store": "the prefixes on disk: show, check and clear them, export and import",
}
EXAMPLES = {
    "": """  mlx-blockpool serve demo              a server with the bundled model
  mlx-blockpool launch claude           Claude Code on it
  mlx-blockpool plan --model ID         what a model and its agents need""",
    "launch": """  mlx-blockpool launch claude
  mlx-blockpool launch codex --model mlx-community/Qwen3-8B-4bit
  mlx-blockpool launch claude -- --continue      arguments of the client follow --""",
    "models": """  mlx-blockpool models
  mlx-blockpool models --download mlx-community/Qwen3-8B-4bit""",
    "demo": """  mlx-blockpool demo --compare
  mlx-blockpool demo --url 127.0.0.1:8080 --turns 2""",
    "service": """  mlx-blockpool service install -- mlx-community/Qwen3-8B-4bit
  mlx-blockpool service logs""",
    "patch": """  mlx-blockpool patch --apply
  mlx_lm.server --cache-backend blockpool --model mlx-community/Qwen3-8B-4bit""",
    "plan": """  mlx-blockpool plan --model mlx-community/Qwen3-8B-4bit --memory 24GB
  mlx-blockpool plan --model ID --context 64k --shared 16k --kv-bits 8""",
    "top": """  mlx-blockpool top
  mlx-blockpool top --url 192.168.1.20:8080 --once""",
    "doctor": """  mlx-blockpool doctor
  mlx-blockpool doctor --model mlx-community/Qwen3-8B-4bit""",
    "plugin": "  mlx-blockpool plugin new my_model",
    "store": """  mlx-blockpool store stats
  mlx-blockpool store check --fix""",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand. Exit status 0, 130 after Ctrl-C, or 2 after a BlockpoolError or
    without mlx, which is printed as argparse prints what is wrong.

    `run` of a subcommand returns the text to print, and the exit status if that is not 0.
    """
    if "_ARGCOMPLETE" in os.environ:
        _complete(os.environ["COMP_LINE"].split())
    arguments = sys.argv[1:] if argv is None else list(argv)
    own, passed_on = arguments, []
    if arguments[:1] in (["launch"], ["service"]) and "--" in arguments:
        end = arguments.index("--")
        own, passed_on = arguments[:end], arguments[end + 1 :]
    try:
        if arguments[:1] == ["serve"]:
            from .server.options import parse

            options = parse(arguments[1:])
            # Importing mlx and mlx-lm takes a second, which no wrong option has to wait for, and
            # makes no garbage.
            gc.disable()
            from .server.app import serve

            return serve(options)
        args = _parser(*own[:1]).parse_args(own)
        args.rest = passed_on
        answer = args.run(args)
        text, status = answer if isinstance(answer, tuple) else (answer, 0)
        print(text)
    except BlockpoolError as error:
        print(f"mlx-blockpool: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130  # 128 and the number of SIGINT, as in shells
    except ImportError:
        problem = mlx_problem()
        if problem is None:
            raise
        print(f"mlx-blockpool: error: {' '.join(problem)}", file=sys.stderr)
        return 2
    return int(status)


def _parser(chosen: str = "") -> argparse.ArgumentParser:
    """The parser of all commands, of which the `chosen` one has options: its module is imported."""
    parser = Parser(
        prog="mlx-blockpool", description="A block-pool KV cache for mlx-lm.", examples=EXAMPLES[""]
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, about in COMMANDS.items():
        command = commands.add_parser(name, help=about, examples=EXAMPLES.get(name, ""))
        if name == chosen:
            actions = _module(name).add_options(command)
            for other in ("agents", "transfer") if name == "store" else ():
                _module(other).add_options(actions)
    return parser


def _complete(words: Sequence[str]) -> None:
    """Print the completions of a command line for the shell that requests them, and exit."""
    from argcomplete import autocomplete

    from .server.options import ServeParser

    autocomplete(ServeParser() if words[1:2] == ["serve"] else _parser(*words[1:2]))


def _module(name: str) -> Any:
    return import_module(f".commands.{name}", __package__)


if __name__ == "__main__":
    sys.exit(main())
