"""`mlx-blockpool models`: the downloaded models and how many agents fit next to each, and the
download of another one.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from ..demo import NAME
from ..errors import BlockpoolError
from ..formatting import human_bytes, line_of, table
from ..model_files import device, modelfile
from .plan import CONTEXT, plan


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `mlx-blockpool models`."""
    download = "download this model of the hub, if its weights fit into memory"
    parser.add_argument("--download", metavar="ID", help=download)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> str:
    if args.download is not None:
        return _download(args.download)
    rows = [["model", "weights", "agents", "tokens of each"]]
    rows += [_row(name) for name in (*modelfile.downloaded(), NAME)]
    last = (
        f"They share {human_bytes(device.memory_bytes())} with the weights. `mlx-blockpool serve "
        "MODEL` serves one, and `mlx-blockpool models --download ID` gets another."
    )
    return "\n".join([*table(rows), "", last])


def _row(name: str) -> list[str]:
    try:
        (found,) = plan([name], CONTEXT, None)
    except BlockpoolError as error:
        return [name, "-", line_of(error), "-"]
    found = replace(found, tokens=min(found.tokens, found.longest or found.tokens))
    size = found.weights.bytes
    agents = f"{found.agents:,}" if found.left > 0 else "the weights do not fit"
    weights = "unknown" if size is None else human_bytes(size)
    return [name, weights, agents, f"{found.tokens:,}"]


def _download(name: str) -> str:
    """Download a model, with a bar for its files. Raises BlockpoolError."""
    from huggingface_hub import HfApi, snapshot_download
    from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

    modelfile.check_form(name)
    try:
        files = HfApi().model_info(name, files_metadata=True).siblings or []
        size = sum(file.size or 0 for file in files if file.rfilename.endswith(".safetensors"))
        if size > (most := device.memory_bytes()):
            raise BlockpoolError(
                f"The weights of {name} take {human_bytes(size)}, and this machine has "
                f"{human_bytes(most)} for them. Choose a smaller model or one of fewer bits."
            )
        snapshot_download(name, allow_patterns=DEFAULT_ALLOW_PATTERNS)
    except BlockpoolError:
        raise
    except Exception as error:
        # Any error of an HTTP library.
        advice = "Check the id and the network"
        raise BlockpoolError(f"Cannot download {name}: {line_of(error)}. {advice}.") from error
    return f"Downloaded. Serve it: mlx-blockpool serve {name}"
