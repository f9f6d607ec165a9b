"""The command mlx-blockpool."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence

from . import __version__, patcher
from .errors import BlockpoolError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand. Exit status 0, or 1 after an error of ours, which is printed without a traceback."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    parser = _parser()
    args, rest = parser.parse_known_args(arguments[:1] if arguments[:1] == ["serve"] else _with_negative_lengths(arguments))
    try:
        if args.command == "serve":
            from .server.app import main as serve

            return serve(arguments[1:])
        if rest:
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        print(args.run(args))
    except BlockpoolError as error:
        print(f"mlx-blockpool: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mlx-blockpool", description="A block-pool KV cache for mlx-lm.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("serve", add_help=False, help="mlx-lm's server on a block pool; --help lists its options")
    _add_patch(commands.add_parser("patch", help="give mlx_lm.server the option --cache-backend, or take it away"))
    _add_plan(commands.add_parser("plan", help="what a batch takes in memory: padded, as mlx-lm batches, against the pool"))
    return parser


def _add_patch(patch: argparse.ArgumentParser) -> None:
    action = patch.add_mutually_exclusive_group()
    action.add_argument("--status", action="store_const", dest="act", const=patcher.status, help="what is installed (default)")
    action.add_argument("--apply", action="store_const", dest="act", const=patcher.apply, help="patch the installed mlx-lm")
    action.add_argument("--revert", action="store_const", dest="act", const=patcher.revert, help="restore it to the byte")
    patch.set_defaults(run=lambda args: patcher.describe((args.act or patcher.status)()))


def _add_plan(plan: argparse.ArgumentParser) -> None:
    plan.add_argument("--lengths", metavar="N,N,..", help="tokens of each sequence of the batch, such as 500,4000,1200")
    plan.add_argument("--model", default="demo", help="a model folder, a config.json, or demo, the bundled model (default)")
    plan.add_argument("--json", action="store_true", help="every figure as JSON")
    plan.set_defaults(run=_plan)


def _plan(args: argparse.Namespace) -> str:
    from . import memory, planning

    lengths = planning.parse_lengths(args.lengths)
    report = memory.batch_memory(planning.spec_at(args.model), lengths)
    return json.dumps(report.as_dict(), indent=2) if args.json else planning.describe(report)


def _with_negative_lengths(arguments: Sequence[str]) -> list[str]:
    """`--lengths -5,3` as one argument: argparse takes -5,3 for an option, and `plan` has a better word for it."""
    joined: list[str] = []
    for argument in arguments:
        if joined[-1:] == ["--lengths"] and re.match(r"-\d", argument):
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    return joined


if __name__ == "__main__":
    sys.exit(main())
