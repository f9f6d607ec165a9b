"""HTTP: mlx-lm's handler, with clear errors and the endpoints that it has not. Runs on the socket's thread, without caches."""

from __future__ import annotations

import io
import json
import logging
import time
import types
from typing import Any

from mlx_lm.server import APIHandler

from ..config import RequestConfig
from ..errors import BlockpoolError, ModelNotFoundError, UnavailableError
from ..mlx_lm_compat import rebind
from .access import HELLO, cause_of, is_model
from .agents.http import AgentsEndpoint, is_agents
from .api.anthropic import Endpoint, is_messages, is_models
from .api.chat import ChatEndpoint, chat_request, choice_of
from .api.openai_errors import ErrorFile, code_of, in_shape, is_openai, status_of
from .api.responses_http import ResponsesEndpoint, is_responses
from .asking import GENERATES, Asking, Wishes, agent_of, retention_of
from .bodies import parse_json
from .bounds import check_count
from .chat import ChatRequest
from .explained import answer_about, is_explain
from .fields import InvalidRequestError, is_number
from .guarded import GuardedHandler
from .models.admin import ORDERS, Admin
from .models.listing import cache_report
from .owners import own_figures

log = logging.getLogger(__name__)

NUMBERS = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "num_draft_tokens",
    "repetition_penalty",
    "repetition_context_size",
    "presence_penalty",
    "presence_context_size",
    "frequency_penalty",
    "frequency_context_size",
    "top_logprobs",
    "xtc_probability",
    "xtc_threshold",
)


class BlockpoolHandler(GuardedHandler):
    """mlx-lm's endpoints. Every error is JSON with a status that says whose it is."""

    def __init__(self, response_generator: Any, *args: Any, **kwargs: Any) -> None:
        self._generator = response_generator
        super().__init__(Asking(response_generator), *args, **kwargs)

    def begin_request(self) -> None:
        self.response_generator = Asking(self._generator)
        self.response_generator.connection = self.connection
        self.created = int(time.time())
        self.stream = self._answered = False
        self._failure = 0
        super().begin_request()

    def do_GET(self) -> None:  # noqa: N802
        try:
            self._get()
        except ConnectionError:
            raise
        except Exception as error:
            # The top of the request's thread.
            log.exception("%s failed", self.path)
            self._send(_status_of(error), {"error": cause_of(error)})

    def _get(self) -> None:
        if self.route == "/v1/cache":
            generator = self.response_generator
            report = own_figures(generator.owner, cache_report(generator.registry, generator.prompt_cache.report))
            self._send(200, {**report, "prompts": generator.prompts.counts})
        elif is_explain(self.route):
            self._send(
                *answer_about(self.route, self.response_generator.explanations, self.response_generator.asker(self.headers))
            )
        elif self.route == "/admin/models":
            self._send(200, Admin(self.response_generator).figures())
        elif is_models(self.path, self.headers):
            Endpoint(self).get_models()
        elif is_messages(self.path):
            Endpoint(self).refuse_path()
        elif self.route == HELLO:
            self._send(200, {"message": "hello"})
        elif is_responses(self.path):
            ResponsesEndpoint(self).get()
        elif is_agents(self.path):
            AgentsEndpoint(self).get()
        elif self.route in ("/v1/models", "/health") or is_model(self.route):
            self.path = self.route
            super().do_GET()
        else:
            self._send(404, {"error": f"Unknown path {self.route}. See the server's README for the endpoints."})

    def do_HEAD(self) -> None:  # noqa: N802
        """The headers of do_GET; clients look with HEAD / whether a server is there."""
        self.wfile = _OnlyHeaders(self.wfile)
        if self.route == "/":
            self._send(200, {})
        else:
            self.do_GET()

    def do_DELETE(self) -> None:  # noqa: N802
        try:
            if is_agents(self.path):
                AgentsEndpoint(self).delete()
            elif is_messages(self.path):
                Endpoint(self).refuse_path()
            else:
                self._send(404, {"error": f"Found no {self.route} to delete; there is DELETE /v1/agents/NAME"})
        except ConnectionError:
            raise
        except Exception as error:
            # The top of the request's thread.
            log.exception("%s failed", self.path)
            self._send(_status_of(error), {"error": cause_of(error)})

    def do_POST(self) -> None:  # noqa: N802
        try:
            if is_messages(self.path):
                Endpoint(self).post()
            elif is_responses(self.path):
                ResponsesEndpoint(self).post()
            elif is_agents(self.path):
                AgentsEndpoint(self).post()
            elif self.route in ORDERS:
                self._order()
            elif self.route in GENERATES:
                self.path = self.route
                self._complete()
            else:
                self._send(404, {"error": f"Unknown path {self.route}. See the server's README for the endpoints."})
        except ConnectionError as error:
            log.info("%s: the client hung up: %s", self.path, error)
        except UnicodeDecodeError as error:
            self._send(400, {"error": f"The body is not UTF-8: {error}"})
        except RecursionError as error:
            if not self._answered:
                self._send(400, {"error": f"The body is nested too deeply: {error}"})
        except Exception as error:
            # The top of the request's thread.
            log.exception("%s failed", self.path)
            status, content = _status_of(error), {"error": cause_of(error)}
            if not self._answered:
                self._send(status, content)
            elif self.stream:
                self.wfile.write(b"data: " + in_shape(status, json.dumps(content).encode()) + b"\n\n")

    def _complete(self) -> None:
        """mlx-lm's do_POST, with a body that was read by our rules."""
        if self.headers.get("Content-Length") is None:
            super().do_POST()
            return
        try:
            body = parse_json(self.rfile.read())
        except InvalidRequestError as error:
            self._send(400, {"error": str(error)})
            return
        self.rfile = io.BytesIO()
        read = types.SimpleNamespace(loads=lambda _: body, dumps=json.dumps, JSONDecodeError=json.JSONDecodeError)
        rebind(APIHandler.do_POST, json=read)(self)

    def validate_model_parameters(self) -> None:
        """mlx-lm's checks, and those of values that would only fail later."""
        try:
            self._validate_all()
        except ValueError as error:
            self.response_generator.refused(error)
            raise

    def _validate_all(self) -> None:
        if self.body.get("max_completion_tokens") is None and self.body.get("max_tokens") is None:
            # A null is what the client leaves to the server.
            self.max_tokens: Any = self.response_generator.cli_args.max_tokens
        bias = self.body.get("logit_bias") if isinstance(self.body.get("logit_bias"), dict) else {}
        check_count("logit_bias", bias, RequestConfig.logit_bias)
        if not all(isinstance(value, int | float) and is_number(value) for value in bias.values()):
            raise ValueError("logit_bias must be a dict of int to float")
        super().validate_model_parameters()
        for name in NUMBERS:
            value = getattr(self, name)
            if isinstance(value, bool) or not is_number(value):
                raise ValueError(f"{name} must be a finite number")
        stop = self.body.get("stop")
        if not (stop is None or isinstance(stop, str) or (isinstance(stop, list) and all(isinstance(s, str) for s in stop))):
            raise ValueError("stop must be a string or a list of strings")
        options: Any = self.body.get("stream_options")
        if options is not None:
            if not isinstance(options, dict):
                raise ValueError("stream_options must be a dict")
            self.stream_options = {"include_usage": False, **options}
        self._validate("chat_template_kwargs", dict, optional=True)
        if "messages" in self.body:
            _check_messages(self.body["messages"])
            self._choice = choice_of(self.body)
        if "prompt" in self.body and not isinstance(self.body["prompt"], str):
            raise ValueError("prompt must be a string")

        self.response_generator.wishes = Wishes(
            agent=agent_of(self.headers.get("X-Agent-Id"), self.body), retention=retention_of(self.body)
        )
        self.response_generator.normalisers = self.response_generator.known_normalisers.asked(self.headers.get("X-Normalise"))

    def handle_chat_completions(self) -> ChatRequest:
        # Images are fetched, if at all, once it is known that the model takes any.
        handle = rebind(APIHandler.handle_chat_completions, _inline_image_urls=lambda messages: None)
        return chat_request(self.body, handle(self), self._choice)

    def handle_completion(self, request: Any, stop_words: list[str]) -> None:
        if isinstance(request, ChatRequest):
            ChatEndpoint(self, request, stop_words, self._choice.one_call).answer()
        else:
            super().handle_completion(request, stop_words)

    def handle_health_check(self) -> None:
        generator = self.response_generator
        self._send(*generator.health.report(generator.is_healthy, generator.has_waiting))

    def handle_models_request(self) -> None:
        try:
            self._send(200, Admin(self.response_generator).models(self.path, self.created))
        except ModelNotFoundError as error:
            self._send(404, {"error": str(error)})

    def _order(self) -> None:
        """A model is to be loaded or unloaded."""
        try:
            answer = Admin(self.response_generator).order(self.route, self.headers.get("Content-Length"), self.rfile.read)
        except (BlockpoolError, ValueError, RuntimeError) as error:
            answer = status_of(error), {"error": str(error)}
        self._send(*answer)

    def end_headers(self) -> None:
        self._answered = True
        told = b"".join(self._headers_buffer).lower()
        for name, value in self.response_generator.headers(self.headers.get("X-Explain")).items():
            if f"\r\n{name}:".lower().encode() not in told:
                self.send_header(name, value)
        super().end_headers()
        if self._failure and is_openai(self.path):
            error = self.response_generator.error
            self.wfile = ErrorFile(self.wfile, self._failure, None if error is None else code_of(error))

    def _set_completion_headers(self, status_code: int = 200) -> None:
        error = self.response_generator.error
        if isinstance(error, ConnectionError):
            raise error
        # mlx-lm answers 404 to whatever generate() raises.
        status = status_of(error) if status_code == 404 and error is not None else status_code
        self._failure = status if status >= 400 else 0
        super()._set_completion_headers(status)

    def _send(self, status: int, content: Any) -> None:
        body = json.dumps(content).encode()
        if status >= 400 and is_openai(self.path):
            body = in_shape(status, body)
        self._headers_buffer = []
        self._set_completion_headers(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _status_of(error: Exception) -> int:
    return 503 if isinstance(error, UnavailableError) else 500


class _OnlyHeaders:
    """A socket that lets the headers of an answer through, which are written at once, and nothing else."""

    closed = False

    def __init__(self, wfile: Any) -> None:
        self._wfile: Any = wfile

    def write(self, data: bytes) -> int:
        if self._wfile is not None:
            self._wfile.write(data)
            self._wfile = None
        return len(data)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages must be a list with at least one message")
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"messages[{i}] must be a dict with a role")
