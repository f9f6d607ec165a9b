"""The command mlx-blockpool."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from . import __version__, patcher
from .errors import BlockpoolError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand. Exit status 0, or 1 after an error of ours, which is printed without a traceback."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(prog="mlx-blockpool", description="A block-pool KV cache for mlx-lm.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("serve", add_help=False, help="mlx-lm's server on a block pool; --help lists its options")
    patch = commands.add_parser("patch", help="give mlx_lm.server the option --cache-backend, or take it away")
    action = patch.add_mutually_exclusive_group()
    action.add_argument("--status", action="store_const", dest="act", const=patcher.status, help="what is installed (default)")
    action.add_argument("--apply", action="store_const", dest="act", const=patcher.apply, help="patch the installed mlx-lm")
    action.add_argument("--revert", action="store_const", dest="act", const=patcher.revert, help="restore it to the byte")
    args, rest = parser.parse_known_args(arguments[:1] if arguments[:1] == ["serve"] else arguments)
    try:
        if args.command == "serve":
            from .server.app import main as serve

            return serve(arguments[1:])
        if rest:
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        print(patcher.describe((args.act or patcher.status)()))
    except BlockpoolError as error:
        print(f"mlx-blockpool: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
