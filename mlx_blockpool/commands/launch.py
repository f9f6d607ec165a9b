"""`mlx-blockpool launch CLIENT`: start a coding client on a local server, and the server if none
runs. Imports no mlx.

What a client needs is in its environment, its arguments or a folder of its settings that only
launch uses: nothing is written into the settings that the client has without it.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from string import Template
from typing import Any
from urllib.parse import urlsplit

from ..config import check_url, user_config_folder
from ..errors import BlockpoolError
from .service import log_file
from .top import URL, Server, api_key

START_SECONDS = 600.0
MODEL = "default_model"
# Without a limit of the model's.
CONTEXT = 131072
LOCAL = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Client:
    """A program, and how it is pointed at a server.

    In all texts $url, $key, $context and $folder stand for the server's URL and key, the most
    tokens of a request, and a folder that only launch uses.

    install:     the command that installs it.
    environment: variables. arguments: those before the user's own.
    files:       settings by their path: in the table in $folder.
    before:      arguments with which the program runs once before it starts.
    """

    program: str
    install: str
    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: Sequence[str] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    before: Sequence[str] = ()

    def filled(self, folder: Path, **values: Any) -> Client:
        """The client with these values in its texts."""

        def fill(text: str) -> str:
            return Template(text).substitute(values, folder=folder)

        return replace(
            self,
            environment={name: fill(text) for name, text in self.environment.items()},
            arguments=[fill(text) for text in self.arguments],
            files={str(folder / path): fill(text) for path, text in self.files.items()},
            before=[fill(text) for text in self.before],
        )

    def lines(self, arguments: Sequence[str]) -> list[str]:
        """Shell commands that do what launch does."""
        lines = []
        for path, text in self.files.items():
            lines.append(f"mkdir -p {shlex.quote(str(Path(path).parent))}")
            lines.append(f"printf %s {shlex.quote(text)} > {shlex.quote(path)}")
        for name, text in self.environment.items():
            lines.append(f"export {name}={shlex.quote(text)}")
        lines += [shlex.join([self.program, *self.before])] if self.before else []
        return [*lines, shlex.join([self.program, *self.arguments, *arguments])]


OPENAI = {"OPENAI_BASE_URL": "$url/v1", "OPENAI_API_KEY": "$key"}
MODELS_OF_CLAUDE = (
    "ANTHROPIC_MODEL",
    "ANTHROPIC_DEFAULT_OPUS_MODEL",
    "ANTHROPIC_DEFAULT_SONNET_MODEL",
    "ANTHROPIC_DEFAULT_HAIKU_MODEL",
    "CLAUDE_CODE_SUBAGENT_MODEL",
)
OPENCODE = """{"model": "blockpool/default_model", "provider": {"blockpool": {
 "npm": "@ai-sdk/openai-compatible", "options": {"baseURL": "$url/v1", "apiKey": "$key"},
 "models": {"default_model": {"limit": {"context": $context, "output": 16384}}}}}}"""
CODEX = (
    'model_providers.blockpool={name="mlx-blockpool", base_url="$url/v1", '
    'env_key="MLX_BLOCKPOOL_API_KEY"}'
)
CLIENTS = {
    "claude": Client(
        "claude",
        "npm install -g @anthropic-ai/claude-code",
        {
            "ANTHROPIC_BASE_URL": "$url",
            "ANTHROPIC_AUTH_TOKEN": "$key",
            **dict.fromkeys(MODELS_OF_CLAUDE, MODEL),
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": "$context",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
    ),
    "codex": Client(
        "codex",
        "npm install -g @openai/codex",
        {"MLX_BLOCKPOOL_API_KEY": "$key"},
        (
            *("-c", f"model={MODEL}", "-c", "model_provider=blockpool"),
            *("-c", "model_context_window=$context", "-c", CODEX),
        ),
    ),
    "opencode": Client(
        "opencode", "npm install -g opencode-ai", {"OPENCODE_CONFIG_CONTENT": OPENCODE}
    ),
    "qwen": Client(
        "qwen",
        "npm install -g @qwen-code/qwen-code",
        {**OPENAI, "OPENAI_MODEL": MODEL},
        ("--auth-type", "openai"),
    ),
    "cline": Client(
        "cline",
        "npm install -g cline",
        {"CLINE_DIR": "$folder"},
        before=(
            *("auth", "openai-compatible", "--apikey", "$key"),
            *("--baseurl", "$url/v1", "--modelid", MODEL),
        ),
    ),
    "aider": Client(
        "aider",
        "pip install aider-chat",
        {"OPENAI_API_BASE": "$url/v1", "OPENAI_API_KEY": "$key"},
        ("--model", f"openai/{MODEL}"),
    ),
    "llm": Client(
        "llm",
        "pip install llm",
        {"LLM_USER_PATH": "$folder", "OPENAI_API_KEY": "$key"},
        ("-m", "local"),
        {
            "extra-openai-models.yaml": "- {model_id: local, model_name: default_model, "
            'api_base: "$url/v1"}\n'
        },
    ),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `mlx-blockpool launch`."""
    parser.add_argument("client", choices=CLIENTS, metavar="CLIENT", help=", ".join(CLIENTS))
    parser.add_argument("--url", default=URL, help=f"the URL of the server (default: {URL})")
    key = "a file with the server's key (default: the variable MLX_BLOCKPOOL_API_KEY)"
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help=key)
    parser.add_argument("--model", help="of the server that is started if none runs")
    parser.add_argument("--print", action="store_true", help="print what would be done")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> tuple[str, int]:
    """`args.rest`: the arguments after --."""
    client, url, key = CLIENTS[args.client], check_url(args.url), api_key(args.api_key_file, False)
    server = _LocalServer(url, key, args.model, args.api_key_file)
    program = shutil.which(client.program)
    if program is None and not args.print:
        raise BlockpoolError(f"{client.program} is not installed. Install it: {client.install}")
    models = server.models() if args.print else server.started()
    client = client.filled(
        url=url,
        key=key or "any",
        context=_context(models or {}),
        folder=user_config_folder() / "clients" / args.client,
    )
    if args.print:
        steps = [] if models is not None else server.lines()
        return "\n".join([*steps, *client.lines(args.rest)]), 0
    assert program is not None
    for path, text in client.files.items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text, encoding="utf-8")
    environment = {**os.environ, **client.environment}
    if client.before:
        before = [program, *client.before]
        ran = subprocess.run(before, env=environment, capture_output=True, text=True, check=False)
        if ran.returncode:
            raise BlockpoolError(
                f"{client.program} {client.before[0]} failed: {(ran.stderr or ran.stdout)[-500:]}"
            )
    sys.stdout.flush()
    os.execve(program, [program, *client.arguments, *args.rest], environment)


def _context(models: Mapping[str, Any]) -> int:
    """The most tokens of a request to the default model."""
    for model in models.get("data", ()):
        if model.get("id") == MODEL:
            return int(model.get("max_model_len") or CONTEXT)
    return CONTEXT


class _LocalServer:
    """The server at a URL, which is started if none runs there and the URL is of this machine."""

    def __init__(self, url: str, key: str | None, model: str | None, key_file: Path | None) -> None:
        self._server = Server(url, key)
        self._url = url
        self.log = log_file()
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BlockpoolError(f"--url must be like {URL} (got {url})")
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._is_here = parts.scheme == "http" and parts.hostname in LOCAL
        self._options = ["--host", parts.hostname, "--port", str(self._port)]
        self._options += [] if model is None else ["--model", model]
        self._options += [] if key_file is None else ["--api-key-file", str(key_file)]
        self.command = [sys.executable, "-m", "mlx_blockpool.cli", "serve", *self._options]

    def models(self) -> dict[str, Any] | None:
        """The list of its models; None if nothing listens there. Raises BlockpoolError."""
        try:
            name = urlsplit(self._url).hostname or ""
            socket.create_connection((name, self._port), timeout=5).close()
        except OSError:
            return None
        return self._server.get("/v1/models", 30.0) or {}

    def _need_model(self) -> None:
        """Raises BlockpoolError if the server that would be started has no model."""
        from ..server.options import parse

        if parse(self._options).model is None:
            raise BlockpoolError(
                f"No server runs at {self._url}, and one that is started needs a model. Give "
                '--model NAME (demo is bundled), or write model = "NAME" into '
                f"{user_config_folder() / 'config.toml'}."
            )

    def lines(self) -> list[str]:
        """Shell commands that start it and wait until it runs. Raises BlockpoolError."""
        self._need_model()
        log, health = shlex.quote(str(self.log)), shlex.quote(f"{self._url}/health")
        return [
            f"mkdir -p {shlex.quote(str(self.log.parent))}",
            f"{shlex.join(self.command)} >> {log} 2>&1 &",
            f"until curl -sf {health} > /dev/null; do kill -0 $! || break; sleep 1; done",
        ]

    def started(self) -> dict[str, Any]:
        """The list of its models, once it runs.

        It goes on after the client has ended, as other clients may use it. Raises BlockpoolError.
        """
        if (found := self.models()) is not None:
            return found
        if not self._is_here:
            raise BlockpoolError(
                f"No server runs at {self._url}. Start it there, or leave out --url."
            )
        self._need_model()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        print(
            f"A server starts: process {process.pid}, log {self.log}. It goes on after the client; "
            f"kill {process.pid} stops it.",
            file=sys.stderr,
        )
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until and process.poll() is None:
            if (found := self.models()) is not None:
                return found
            time.sleep(0.2)
        process.kill()
        last = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-5:]
        raise BlockpoolError(
            "\n".join([f"The server did not start. The end of {self.log}:", *last])
        )
