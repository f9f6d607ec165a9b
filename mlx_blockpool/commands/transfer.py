"""`mlx-blockpool store export` and `store import`: prefixes as prompt-cache files of mlx-lm."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..config import parse_bytes
from ..errors import StoreError
from ..formatting import Report, line_of
from ..spec import BLOCK_TOKENS
from ..store.paths import default_folder
from .plan import add_kv_options, kv_bits_of
from .store import Actions, add_action, folder_at


def add_options(actions: Actions) -> None:
    """Add `export` and `import` to the actions of `store`."""
    text = "write the longest stored prefix of a prompt as a prompt-cache file of mlx-lm"
    exporting = add_action(actions, "export", text, _export, describe_export)
    prompt = exporting.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--tokens", metavar="N,N,..", help="token ids of the prompt")
    prompt.add_argument(
        "--prompt-file",
        type=Path,
        metavar="FILE",
        help="the text of the prompt, with its special tokens",
    )
    importing = add_action(
        actions,
        "import",
        "put the prefix in a file of `store export` into the store",
        _import,
        describe_import,
    )
    importing.add_argument(
        "--store-bytes", metavar="SIZE", help="hard limit for the store on disk, as the server's"
    )
    for action in (exporting, importing):
        action.add_argument(
            "file",
            type=Path,
            metavar="FILE",
            help="a .safetensors file, as of mlx-lm's save_prompt_cache",
        )
        action.add_argument(
            "--model", required=True, help="the model folder, or the id of a downloaded model"
        )
        action.add_argument(
            "--adapter-path", type=Path, metavar="DIR", help="the adapter of the model"
        )
        add_kv_options(action, "the bits of keys and values in memory, as the server's")
        action.add_argument("--agent", metavar="NAME", help="the agent whose prefix it is")


# mlx is imported when they run: the other commands start without it.


def _export(args: argparse.Namespace) -> Report:
    from .cache_file import StoredModel, export, ids_in

    source = StoredModel(
        args.model, folder_at(args.store_dir), args.adapter_path, kv=kv_bits_of(args)
    )
    try:
        tokens = (
            source.encode(args.prompt_file.read_text(encoding="utf-8"))
            if args.tokens is None
            else ids_in(args.tokens)
        )
    except (OSError, ValueError) as error:
        raise StoreError(
            f"Cannot read the prompt: {line_of(error)}. Give --prompt-file a text file, or "
            "--tokens 1,2,3."
        ) from error
    return export(source, tokens, args.file, args.agent)


def _import(args: argparse.Namespace) -> Report:
    from .cache_file import StoredModel, import_file

    root = args.store_dir or default_folder()
    size = args.store_bytes and parse_bytes(args.store_bytes)
    return import_file(
        StoredModel(args.model, root, args.adapter_path, size, kv_bits_of(args)),
        args.file,
        args.agent,
    )


# -- words -----------------------------------------------------------------------------------------


def describe_export(report: Report) -> str:
    return f"Wrote {report['tokens']:,} of {report['given']:,} tokens to {report['file']}."


def describe_import(report: Report) -> str:
    blocks = f"{report['blocks']:,} blocks of at most {BLOCK_TOKENS} tokens"
    return (
        f"Stored {report['tokens']:,} tokens from {report['file']} in {report['folder']}, {blocks}."
    )
