"""The server's first words: what it serves, within which budgets, what it found on disk, and how clients reach it."""

from __future__ import annotations

from ..clients import settings
from ..errors import BlockpoolError
from ..formatting import count, human_bytes
from ..store.paths import default_folder
from .generator import BlockpoolGenerator
from .model import LoadedModel

# Addresses that stand for all of this machine's.
ANYWHERE = ("", "0.0.0.0", "::")


def first_words(generator: BlockpoolGenerator, host: str, port: int) -> str:
    """The lines for the person who has started the server. `port`: the one on which it listens."""
    name = "127.0.0.1" if host in ANYWHERE else f"[{host}]" if ":" in host else host
    url, model = f"http://{name}:{port}", generator.model
    context = None if model is None else model.positions
    lines = ["The server is ready.", *_of_model(generator, model), _of_store(generator, model), f"  open   {url}/"]
    key = "any" if generator.guard.is_open else "KEY"
    lines += [f"  {client}: {line}" for client, line in settings(url, context, key).items()]
    return "\n".join(lines)


def _of_model(generator: BlockpoolGenerator, model: LoadedModel | None) -> list[str]:
    if model is None:
        return ["  model  none yet: requests name one of GET /v1/models"]
    id = generator.registry.catalog.id_of(model.key.model)
    pool = f"{human_bytes(model.pool_bytes)} for keys and values"
    return [f"  model  {id}, {human_bytes(model.weights_bytes)} of weights, with {model.how}", f"  pool   {pool}"]


def _of_store(generator: BlockpoolGenerator, model: LoadedModel | None) -> str:
    config, files = generator.store_config, generator.agent_files
    if config is None or files is None:
        return "  store  none: cached prefixes end with the server"
    text = f"  store  {config.folder or default_folder()}, {human_bytes(config.store_bytes)} at most"
    namespace = None if model is None or model.agents is None else model.agents.namespace
    try:
        own = [agent for agent in files.all() if agent.namespace == namespace]
    except (BlockpoolError, OSError):
        own = []
    if not own:
        return f"{text}; it has nothing of this model" if model is not None else text
    return f"{text}; on it {count(len(own), 'agent')} with {count(sum(agent.tokens for agent in own), 'token')}"
