"""The versions, names and parameters of mlx-lm that the package needs beyond its public API, and
why.

The rest of the package imports these names from here. The members of mlx-lm's classes that it uses
are listed here too, so that one test names the changes of another mlx-lm. Its modules and classes
are never modified: rebind() copies a function. mlx-lm is imported when a name is first needed.
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib.util
import re
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion

from .errors import UnsupportedVersionError

T = TypeVar("T")
SUPPORTED = ">=0.32.2,<0.33"
_reading = threading.Lock()


@dataclass(frozen=True)
class StockName:
    """Why the package needs a name of mlx-lm, and which properties of it must not change.

    parameters: of a function or class, without annotations; None: they do not matter, or it has
    none.
    reads:      the globals of a function that rebind() replaces in a copy.
    """

    why: str
    parameters: str | None = None
    reads: tuple[str, ...] = ()


# The names that the rest of the package imports from here, by their paths below mlx_lm.
IMPORTED: dict[str, StockName] = {
    "server.main": StockName(
        "parses the options, opens the device and starts the server; it gets our parser, our "
        "provider and our run()",
        "()",
        ("argparse", "maybe_set_recommended_wired_limit", "ModelProvider", "run"),
    ),
    "server._run_http_server": StockName(
        "binds the port and serves with our classes",
        "(host, port, response_generator, server_class, handler_class)",
    ),
    "server._make_sampler": StockName(
        "the sampler of a request; its copy draws from the request's own seed",
        "(args, tokenizer)",
        ("make_sampler",),
    ),
    "server._make_logits_processors": StockName("a request's penalties and biases", "(args)"),
    "server._image_parts": StockName("finds the images of a chat", "(messages)"),
    "server._image_url": StockName("reads the URL of an image part", "(part)"),
    "server.process_message_content": StockName(
        "joins the text parts of messages as templates see them", "(messages, *, keep_images)"
    ),
    "server.convert_chat": StockName(
        "a chat as text for models without a template", "(messages, role_mapping)"
    ),
    "utils.load": StockName(
        "loads a model; the copy of _load() keeps the weights lazy, and its copy takes the classes "
        "of plugins",
        "(path_or_hf_repo, tokenizer_config, model_config, adapter_path, lazy, return_config, "
        "revision, trust_remote_code)",
        ("load_model",),
    ),
    "utils.sharded_load": StockName(
        "loads one rank's share of a model; its copy omits the barrier at the end and takes the "
        "classes of plugins",
        "(repo, pipeline_group, tensor_group, return_config, *, tokenizer_config, "
        "trust_remote_code)",
        ("mx", "load_model"),
    ),
    "server.CompletionRequest": StockName(
        "ChatRequest extends it", "(request_type, prompt, messages, tools, role_mapping)"
    ),
    "server.GenerationArguments": StockName(
        "our protocols build it",
        "(model, sampling, logits, stop_words, max_tokens, num_draft_tokens, logprobs, "
        "top_logprobs, seed, chat_template_kwargs)",
    ),
    "server.SamplingArguments": StockName(
        "our protocols build it",
        "(temperature, top_p, top_k, min_p, xtc_probability, xtc_threshold)",
    ),
    "server.LogitsProcessorArguments": StockName(
        "our protocols build it",
        "(logit_bias, repetition_penalty, repetition_context_size, presence_penalty, "
        "presence_context_size, "
        "frequency_penalty, frequency_context_size)",
    ),
    "server.ModelDescription": StockName(
        "the model that a request names", "(model, draft, adapter)"
    ),
    "server.GenerationContext": StockName(
        "the handler reads it before the first token",
        "(has_tool_calling, has_thinking, tool_parser, text_sm, initial_state, prompt, "
        "prompt_cache_count, _should_stop)",
    ),
    "server.Vision": StockName(
        "the images of a prompt, which the workers prepare", "(pixel_values, starts, cache_key)"
    ),
    "server.Response": StockName(
        "the handler reads one for each token", "(text, token, logprob, finish_reason, top_tokens)"
    ),
    "server.ResponseGenerator": StockName(
        "tokenizes, and serves by itself what the engine cannot", "(model_provider, prompt_cache)"
    ),
    "server.APIHandler": StockName(
        "mlx-lm's endpoints", "(response_generator, *args, system_fingerprint, **kwargs)"
    ),
    "server.ModelProvider": StockName("holds one loaded model", "(cli_args)"),
    "utils._download": StockName(
        "a folder as it is, or the folder of a hub's id",
        "(path_or_hf_repo, revision, allow_patterns)",
    ),
    "utils._get_classes": StockName("the model class of a config.json", "(config)"),
    "utils.hf_repo_to_path": StockName(
        "the folder that the hub's cache has of an id, and no download", "(hf_repo)"
    ),
    "models.cache._BaseCache": StockName("the base of caches: nbytes, state, from_state", "()"),
}

# All names. The last part of a path may be an attribute that the class's methods assign.
STOCK: dict[str, StockName] = IMPORTED | {
    # The server's functions.
    "sample_utils.make_sampler": StockName(
        "the sampler's parts; its copy draws with our keys",
        None,
        ("categorical_sampling", "apply_xtc"),
    ),
    "sample_utils.apply_xtc": StockName(
        "the part of XTC after its random draw",
        "(logits, xtc_probability, xtc_threshold, xtc_special_tokens)",
    ),
    # What travels with a request.
    "processors.muse_spark.Processor.preprocess_image": StockName(
        "the pixels of an image; its copy leaves them in numpy", "(self, image)", ("mx",)
    ),
    "server.GenerationContext._should_stop": StockName(
        "the handler sets it when a client hangs up"
    ),
    # ResponseGenerator, which BlockpoolGenerator extends.
    "server.ResponseGenerator._run_generate": StockName(
        "the body of the generation thread, which ours replaces", "(self)"
    ),
    "server.ResponseGenerator._tokenize": StockName(
        "renders and tokenizes; it reads chat_template_args and the processor of self",
        "(self, tokenizer, request, args)",
    ),
    "server.ResponseGenerator._make_state_machine": StockName(
        "the stop sequences and text states of a request",
        "(self, model_key, tokenizer, stop_words)",
    ),
    "server.ResponseGenerator._serve_single": StockName(
        "serves a request alone: drafts, images; its copy holds the reply to a form",
        "(self, request, stream)",
        ("_make_logits_processors",),
    ),
    "server.ResponseGenerator.generate": StockName(
        "the handler calls it; ours prepares the prompt first",
        "(self, request, generation_args, progress_callback)",
    ),
    "server.ResponseGenerator.stop_and_join": StockName(
        "ends the thread; ours does not wait for a load that hangs", "(self)"
    ),
    "server.ResponseGenerator.generation_available": StockName(
        "whether the thread still serves", "(self)"
    ),
    "server.ResponseGenerator._generation_failed": StockName(
        "whether the thread has ended because no model could be loaded"
    ),
    "server.ResponseGenerator.cli_args": StockName("the parsed options"),
    "server.ResponseGenerator.model_provider": StockName(
        "the model that _tokenize() and _serve_single() use"
    ),
    "server.ResponseGenerator.prompt_cache": StockName("the prefixes that _serve_single() uses"),
    "server.ResponseGenerator.requests": StockName("the queue into the generation thread"),
    "server.ResponseGenerator._generation_thread": StockName("ours joins it with a timeout"),
    "server.ResponseGenerator._state_machine_cache": StockName(
        "emptied when a model is loaded again under the same key"
    ),
    "server.ResponseGenerator._stop": StockName("ends the thread"),
    # APIHandler, which our handler extends.
    "server.APIHandler.do_GET": StockName("ours serves more paths", "(self)"),
    "server.APIHandler.do_POST": StockName("ours serves more paths", "(self)"),
    "server.APIHandler.do_OPTIONS": StockName("ours frames its response", "(self)"),
    "server.APIHandler._set_cors_headers": StockName("headers of our own endpoints", "(self)"),
    "server.APIHandler.response_generator": StockName("replaced for each request of a connection"),
    "server.APIHandler.created": StockName("set again for each request of a connection"),
    "server.APIHandler.system_fingerprint": StockName("a field of every packet of a chat"),
    # ModelProvider, which BlockpoolModelProvider extends.
    "server.ModelProvider._load": StockName(
        "its copy loads lazily, or one rank's share",
        "(self, model_path, adapter_path, draft_model_path)",
        ("load", "sharded_load"),
    ),
    "server.ModelProvider._model_map": StockName("names of models; the bundled ones are added"),
    "server.ModelProvider._tokenizer_config": StockName(
        "options of the tokenizer, for the processes that tokenize"
    ),
    "server.ModelProvider.cli_args": StockName("the parsed options"),
    "server.ModelProvider.draft_model": StockName("its weights count as the model's"),
    "server.ModelProvider.is_distributed": StockName(
        "whether it loads one rank's share of a model"
    ),
    "server.ModelProvider.pipeline_group": StockName("whether ranks share a model layer by layer"),
    "server.ModelProvider.model": StockName("the loaded model"),
    "server.ModelProvider.model_key": StockName("what is loaded: model, adapter, draft"),
    # Models and tokenizers.
    "tokenizer_utils.TokenizerWrapper._tokenizer": StockName(
        "the transformers tokenizer, for offsets of characters"
    ),
    # Caches.
    "models.cache.LRUPromptCache": StockName(
        "prefixes of models that cannot be in blocks", "(max_size, max_bytes)"
    ),
    "models.cache.LRUPromptCache._trie": StockName("how many tokens a fetch would find"),
    "models.cache.PromptTrie._trie": StockName(
        "salts of which nothing is cached any more are dropped"
    ),
    "models.cache.LRUPromptCache.fetch_nearest_cache": StockName(
        "ours leaves a token to compute", "(self, model, tokens)"
    ),
    "models.cache.LRUPromptCache.insert_cache": StockName(
        "ours cuts caches that are ahead of their tokens",
        "(self, model, tokens, prompt_cache, *, cache_type)",
    ),
    "generate.StopSequences._root": StockName("the sequences, which other ranks need"),
    "models.cache.RotatingKVCache._temporal_order": StockName(
        "a ring in the order of its tokens", "(self, v)"
    ),
    "models.cache.save_prompt_cache": StockName(
        "its copy passes on what it would write", "(file_name, cache, metadata)", ("mx",)
    ),
    "models.cache.load_prompt_cache": StockName(
        "finds the class of a saved cache by its name among these", "(file_name, return_metadata)"
    ),
    "models.cache.ArraysCache": StockName("a name in saved files"),
    "models.cache.CacheList": StockName("a name in saved files"),
    "models.cache.ChunkedKVCache": StockName("a name in saved files"),
    "models.cache.KVCache": StockName("a name in saved files"),
    "models.cache.QuantizedKVCache": StockName("a name in saved files"),
    "models.cache.RotatingKVCache": StockName("a name in saved files"),
    "models.base.scaled_dot_product_attention": StockName(
        "attached models call ours in its place",
        "(queries, keys, values, cache, scale, mask, sinks)",
    ),
}

# Name in this module -> path. Private names lose their underscore.
EXPORTS = {path.rpartition(".")[2].lstrip("_"): path for path in IMPORTED}


def __getattr__(name: str) -> Any:
    """A name of EXPORTS. Raises UnsupportedVersionError where the installed mlx-lm lacks it."""
    if name not in EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = EXPORTS[name].rpartition(".")
    try:
        return getattr(importlib.import_module(f"mlx_lm.{module}"), attribute)
    except AttributeError as error:
        raise UnsupportedVersionError(
            f"mlx-lm {installed()} has no {EXPORTS[name]}. {_advice()}"
        ) from error


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of mlx-lm's server to a parser, as server.main() does. mlx-lm is read and not
    imported, which would take a second.

    Raises UnsupportedVersionError if its main() does not add them one by one.
    """
    # In Python 3.11 one thread's parsing disturbs another's.
    with _reading:
        code = _server_options()
    exec(code, {"parser": parser})


@functools.cache
def _server_options() -> types.CodeType:
    spec = importlib.util.find_spec("mlx_lm")
    assert spec is not None, "check_version() has found mlx-lm"
    path = Path(str(spec.origin)).with_name("server.py")
    adding = [
        each
        for function in _statements(path, {"main"})
        if isinstance(function, ast.FunctionDef)
        for each in function.body
        if ast.unparse(each).startswith("parser.add_argument(")
    ]
    if not adding:
        raise UnsupportedVersionError(
            f"mlx-lm {installed()} has no options in server.main. {_advice()}"
        )
    body = [*_defined(path, _names(*adding)), *adding]
    return compile(ast.Module(body, []), path, "exec")


def _names(*code: ast.AST) -> set[str]:
    return {each.id for part in code for each in ast.walk(part) if isinstance(each, ast.Name)}


def _statements(path: Path, names: set[str]) -> list[ast.stmt]:
    """The statements at the top of a module that import anything, or begin with one of some names
    or its definition. To parse the others too takes many times as long.
    """
    wanted = re.compile(rf"from|import|(?:def )?(?:{'|'.join(names)})\b")
    parts = re.split(r"^(?=\w)", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return [each for part in parts if wanted.match(part) for each in ast.parse(part).body]


def _defined(path: Path, names: set[str]) -> list[ast.stmt]:
    """The statements of a module of mlx-lm that define or import some names, with what these
    functions use in turn; from the modules next to it too.
    """
    found: list[ast.stmt] = []
    for each in _statements(path, names):
        if isinstance(each, ast.ImportFrom) and each.level:
            own = {alias.name for alias in each.names}
            if not own.isdisjoint(names):
                found += _defined(path.with_name(f"{each.module}.py"), own & names)
        elif isinstance(each, ast.Import | ast.ImportFrom):
            own = {alias.asname or alias.name for alias in each.names}
            found += [] if own.isdisjoint(names) else [each]
        elif isinstance(each, ast.FunctionDef) and each.name in names:
            found += [*_defined(path, _names(*each.body) - names), each]
        elif isinstance(each, ast.Assign) and not _names(*each.targets).isdisjoint(names):
            found.append(each)
    return found


def installed() -> str:
    """The version of the installed mlx-lm; "none" without one."""
    try:
        return metadata.version("mlx-lm")
    except metadata.PackageNotFoundError:
        return "none"


def check_version(version: str | None = None) -> None:
    """Raises UnsupportedVersionError unless the installed mlx-lm (or `version`) is in the
    supported range.
    """
    version = installed() if version is None else version
    try:
        is_supported = SpecifierSet(SUPPORTED).contains(version, prereleases=True)
    except InvalidVersion:
        is_supported = False
    if not is_supported:
        raise UnsupportedVersionError(
            f"mlx-lm {version} is installed; mlx-blockpool needs {SUPPORTED}. {_advice()}"
        )


def _advice() -> str:
    return f"Install a supported version: pip install 'mlx-lm{SUPPORTED}'."


def saved_as(stock: type) -> Callable[[type[T]], type[T]]:
    """Give the decorated class mlx-lm's name: save_prompt_cache writes it, and load_prompt_cache
    looks it up in mlx-lm.
    """

    def rename(cls: type[T]) -> type[T]:
        cls.__name__ = stock.__name__
        return cls

    return rename


def rebind(function: Callable[..., Any], **names: Any) -> Callable[..., Any]:
    """A copy of `function` that reads `names` in place of its module's globals.

    The original and its module do not change.
    """
    assert isinstance(function, types.FunctionType), f"{function!r} is not a Python function"
    unknown = [name for name in names if name not in function.__globals__]
    assert not unknown, f"{function.__module__} has no {unknown}"
    copy = types.FunctionType(
        function.__code__,
        {**function.__globals__, **names},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
