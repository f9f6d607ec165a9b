"""The command mlx-blockpool."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import __version__
from .commands import patch
from .config import parse_bytes
from .errors import BlockpoolError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand. Exit status 0, or 1 after an error of ours, which is printed without a traceback.

    `run` of a subcommand gives what to print, and the exit status where that is not 0.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    parser = _parser()
    args, rest = parser.parse_known_args(arguments[:1] if arguments[:1] == ["serve"] else _with_negative_lengths(arguments))
    try:
        if args.command == "serve":
            from .server.app import main as serve

            return serve(arguments[1:])
        if rest:
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        answer = args.run(args)
        text, status = answer if isinstance(answer, tuple) else (answer, 0)
        print(text)
    except BlockpoolError as error:
        print(f"mlx-blockpool: {error}", file=sys.stderr)
        return 1
    return int(status)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mlx-blockpool", description="A block-pool KV cache for mlx-lm.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("serve", add_help=False, help="mlx-lm's server on a block pool; --help lists its options")
    _add_patch(commands.add_parser("patch", help="give mlx_lm.server the option --cache-backend, or take it away"))
    _add_plan(commands.add_parser("plan", help="what a model and its agents take in memory, before it is downloaded"))
    _add_store(commands.add_parser("store", help="the prefixes on disk: look at them, check, clear, carry in and out"))
    return parser


def _add_patch(command: argparse.ArgumentParser) -> None:
    action = command.add_mutually_exclusive_group()
    action.add_argument("--status", action="store_const", dest="act", const=patch.status, help="what is installed (default)")
    action.add_argument("--apply", action="store_const", dest="act", const=patch.apply, help="patch the installed mlx-lm")
    action.add_argument("--revert", action="store_const", dest="act", const=patch.revert, help="restore it to the byte")
    command.set_defaults(run=lambda args: patch.describe((args.act or patch.status)()))


def _add_plan(plan: argparse.ArgumentParser) -> None:
    model = "a model folder, a config.json, the id of a downloaded model, or demo, the bundled one (default); may be given again"
    plan.add_argument("--model", action="append", help=model)
    memory = "what the model and its agents may take together, such as 24GB (default: what this machine gives to a model)"
    plan.add_argument("--memory", metavar="SIZE", help=memory)
    plan.add_argument("--context", metavar="N", help="tokens of each agent, such as 8192 or 32k (default: 4k)")
    plan.add_argument("--kv-bits", type=int, choices=(4, 8), help="count agents whose keys and values are quantised")
    plan.add_argument("--lengths", metavar="N,N,..", help="a batch instead: tokens of each sequence, such as 500,4000,1200")
    plan.add_argument("--json", action="store_true", help="every figure as JSON")
    plan.set_defaults(run=_plan)


def _plan(args: argparse.Namespace) -> str:
    from .commands import plan

    report = plan.plan(args.model or ["demo"], args.lengths, args.context, args.memory, args.kv_bits)
    return json.dumps(report.as_dict(), indent=2) if args.json else report.text()


def _add_store(store: argparse.ArgumentParser) -> None:
    actions = store.add_subparsers(dest="action", required=True, metavar="ACTION")

    def add(name: str, act: Any, text: str, where: Any = actions) -> argparse.ArgumentParser:
        action: argparse.ArgumentParser = where.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        action.add_argument("--store-dir", type=Path, metavar="DIR", help="where the store is (default: the user's cache folder)")
        action.add_argument("--json", action="store_true", help="everything as JSON")
        action.set_defaults(run=lambda args: _store(args, act))
        return action

    add("path", _store_path, "print the folder of the store")
    add("stats", _store_stats, "what is stored for each model")
    fix = "bad records to quarantine; leftovers, and records that nothing leads to, removed"
    add("check", _store_check, "check the name, length and header of every record; status 1 if something is wrong").add_argument(
        "--fix", action="store_true", help=fix
    )
    add("scrub", _store_check, "check every record to its last byte; status 1 if something is wrong").add_argument(
        "--fix", action="store_true", help=fix
    )
    clear = add("clear", _store_clear, "remove records")
    clear.add_argument("--model", metavar="ID", help="only those of this model, by its id or namespace (default: all)")
    clear.add_argument("--yes", action="store_true", help="do not ask")
    add("agents", _store_agents, "what is stored for each agent")
    _add_agent(actions.add_parser("agent", help="pin, rename, fork or delete one agent"), add)
    export = add("export", _store_export, "write the longest stored prefix of a prompt as a prompt-cache file of mlx-lm")
    _add_exchange(export, "OUT", prompt_required=True)
    taken = add("import", _store_import, "put the prefix in a prompt-cache file of mlx-lm into the store")
    _add_exchange(taken, "FILE", prompt_required=False)
    taken.add_argument("--store-bytes", type=_size, metavar="SIZE", help="hard limit for what is on disk, as the server's")


def _add_agent(agent: argparse.ArgumentParser, add: Any) -> None:
    changes = agent.add_subparsers(dest="change", required=True, metavar="CHANGE")
    for name, text in (
        ("pin", "spare its records when others are dropped"),
        ("unpin", "let its records go with others"),
        ("rename", "give it another name"),
        ("fork", "let a second agent go on from where it is"),
        ("delete", "remove it with the records that only it stands on; status 1 if they are still there or others are bad"),
    ):
        change = add(name, _store_delete if name == "delete" else _store_agent, text, changes)
        change.add_argument("name", metavar="NAME", help="the agent, as `store agents` shows it")
        if name in ("rename", "fork"):
            change.add_argument("new", metavar="NEW", help="a name that is free")
        if name == "delete":
            change.add_argument("--yes", action="store_true", help="do not ask")


def _add_exchange(action: argparse.ArgumentParser, file: str, prompt_required: bool) -> None:
    action.add_argument("file", type=Path, metavar=file, help="a .safetensors file of mlx-lm's save_prompt_cache")
    action.add_argument("--model", required=True, help="the model folder, or the id of a downloaded model")
    action.add_argument("--adapter-path", type=Path, metavar="DIR", help="the adapter that the model runs with")
    action.add_argument("--store-bits", type=int, choices=(4, 8), help="as the server's: how the store is quantised")
    action.add_argument("--agent", metavar="NAME", help="the agent whose prefix it is; needed for files of other stores")
    prompt = action.add_mutually_exclusive_group(required=prompt_required)
    prompt.add_argument("--tokens", metavar="N,N,..", help="token ids of the prompt")
    prompt.add_argument("--prompt-file", type=Path, metavar="FILE", help="the prompt's text, special tokens and all")


def _store(args: argparse.Namespace, act: Any) -> tuple[str, int]:
    report, describe, status = act(args)
    return json.dumps(report, indent=2) if args.json else describe(report), status


def _store_path(args: argparse.Namespace) -> Any:
    from .store.paths import default_folder

    return {"folder": str(args.store_dir or default_folder())}, lambda report: report["folder"], 0


def _store_stats(args: argparse.Namespace) -> Any:
    from . import storing

    return storing.stats(storing.folder_at(args.store_dir)), storing.describe_stats, 0


def _store_check(args: argparse.Namespace) -> Any:
    from . import storing

    report = storing.check(storing.folder_at(args.store_dir), args.action == "scrub", args.fix)
    return report, storing.describe_check, int(not report["clean"])


def _store_clear(args: argparse.Namespace) -> Any:
    from . import storing

    return storing.clear(storing.folder_at(args.store_dir), args.model, args.yes), storing.describe_clear, 0


def _store_agents(args: argparse.Namespace) -> Any:
    from . import agents, storing

    return agents.listed(storing.folder_at(args.store_dir)), agents.describe_listed, 0


def _store_agent(args: argparse.Namespace) -> Any:
    from . import agents, storing

    root = storing.folder_at(args.store_dir)
    return agents.change(root, args.change, args.name, getattr(args, "new", "")), agents.describe_change, 0


def _store_delete(args: argparse.Namespace) -> Any:
    from . import agents, storing

    report = agents.delete(storing.folder_at(args.store_dir), args.name, args.yes)
    return report, agents.describe_delete, int(not report["clean"])


def _store_export(args: argparse.Namespace) -> Any:
    from . import exchange, model_source, storing

    prompt = model_source.prompt_of(args.tokens, args.prompt_file)
    model = model_source.Source(args.model, storing.folder_at(args.store_dir), args.adapter_path, args.store_bits)
    return exchange.export(model, prompt, args.file, args.agent), exchange.describe_export, 0


def _store_import(args: argparse.Namespace) -> Any:
    from . import exchange, model_source
    from .store.paths import default_folder

    prompt = model_source.prompt_of(args.tokens, args.prompt_file)
    root = args.store_dir or default_folder()
    model = model_source.Source(args.model, root, args.adapter_path, args.store_bits, args.store_bytes)
    return exchange.take_in(model, prompt, args.file, args.agent), exchange.describe_import, 0


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except BlockpoolError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


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
