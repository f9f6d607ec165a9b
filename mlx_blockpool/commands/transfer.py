"""`mlx-blockpool store export` and `store import`: prefixes as prompt-cache files of mlx-lm."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..config import parse_bytes
from ..errors import BlockpoolError
from ..formatting import Report
from ..spec import BLOCK_TOKENS
from ..store.agent_files import shown
from ..store.paths import default_folder
from .plan import add_kv_options, kv_bits_of
from .store import Actions, add_action, folder_at


def add_options(actions: Actions) -> None:
    """Add `export` and `import` to the actions of `store`."""
    text = "write the longest stored prefix of a prompt as a prompt-cache file of mlx-lm"
    _add_common(add_action(actions, "export", text, _export, describe_export), "OUT", prompt_required=True)
    text = "put the prefix in a prompt-cache file of mlx-lm into the store"
    importing = add_action(actions, "import", text, _import, describe_import)
    _add_common(importing, "FILE", prompt_required=False)
    importing.add_argument("--store-bytes", type=_size, metavar="SIZE", help="hard limit for what is on disk, as the server's")


def _add_common(action: argparse.ArgumentParser, file: str, prompt_required: bool) -> None:
    action.add_argument("file", type=Path, metavar=file, help="a .safetensors file of mlx-lm's save_prompt_cache")
    action.add_argument("--model", required=True, help="the model folder, or the id of a downloaded model")
    action.add_argument("--adapter-path", type=Path, metavar="DIR", help="the adapter that the model runs with")
    action.add_argument("--store-bits", type=int, choices=(4, 8), help="as the server's: how the store is quantised")
    add_kv_options(action, "as the server's: the bits of keys and values in memory")
    action.add_argument("--agent", metavar="NAME", help="the agent whose prefix it is; needed for files of other stores")
    prompt = action.add_mutually_exclusive_group(required=prompt_required)
    prompt.add_argument("--tokens", metavar="N,N,..", help="token ids of the prompt")
    prompt.add_argument("--prompt-file", type=Path, metavar="FILE", help="the prompt's text, special tokens and all")


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except BlockpoolError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


# mlx is imported when they run: the other commands start without it.


def _export(args: argparse.Namespace) -> Report:
    from ..transfer import model_source, offline

    prompt = model_source.prompt_of(args.tokens, args.prompt_file)
    source = model_source.Source(args.model, folder_at(args.store_dir), args.adapter_path, args.store_bits, kv=kv_bits_of(args))
    return offline.export(source, prompt, args.file, args.agent)


def _import(args: argparse.Namespace) -> Report:
    from ..transfer import model_source, offline

    prompt = model_source.prompt_of(args.tokens, args.prompt_file)
    root = args.store_dir or default_folder()
    source = model_source.Source(args.model, root, args.adapter_path, args.store_bits, args.store_bytes, kv_bits_of(args))
    return offline.import_file(source, prompt, args.file, args.agent)


# -- words -------------------------------------------------------------------------------------------------------------


def describe_export(report: Report) -> str:
    return f"Wrote {report['tokens']:,} of {report['given']:,} tokens to {report['file']}."


def describe_import(report: Report) -> str:
    blocks = f"{report['blocks']:,} blocks of at most {BLOCK_TOKENS} tokens"
    whose = f" Only agent {shown(report['agent'])} continues from them: {report['why']}." if report["private"] else ""
    return f"Stored {report['tokens']:,} tokens from {report['file']} in {report['folder']}, {blocks}.{whose}"
