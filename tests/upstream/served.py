"""mlx-lm's generator and handler as its own tests of the server use them, with ours in their place.

The tests make providers of their own around the small model; ours loads it again, from its folder,
with the tests' options.
"""

from __future__ import annotations

import os
from typing import Any

from mlx_lm.models import cache as stock
from server.serving import parse

from mlx_blockpool.server.app import make_generator
from mlx_blockpool.server.generator import BlockpoolGenerator
from mlx_blockpool.server.http import BlockpoolHandler
from mlx_blockpool.server.jobs import between_steps
from mlx_blockpool.server.provider import BlockpoolModelProvider

# Options of the tests' providers that name models under names of their own.
MODELS = ("model", "draft_model")


class ServedPrefixes:
    """What a test takes for the prompt cache of its server: the one of `generator`, which makes
    its own.
    """

    generator: BlockpoolGenerator | None = None

    def fetch_nearest_cache(self, model: Any, tokens: list[int]) -> tuple[Any, list[int]]:
        assert self.generator is not None
        served = self.generator.model
        assert served is not None
        found: tuple[Any, list[int]] = between_steps(
            self.generator, lambda: served.sequential.fetch_nearest_cache(model, tokens)
        )
        return found


def response_generator(provider: Any, prompt_cache: ServedPrefixes) -> BlockpoolGenerator:
    """ResponseGenerator(provider, prompt_cache): ours, with the model loaded, or without one
    where the test's provider fails.
    """
    fails = not hasattr(provider, "model")
    # The hub's folder is no model.
    folder = os.environ["HF_HUB_CACHE" if fails else "BLOCKPOOL_UPSTREAM_MODEL"]
    given = {
        name: value
        for name, value in vars(getattr(provider, "cli_args", object)).items()
        if not name.startswith("__")
    }
    options = ["--draft-model", folder] if given.get("draft_model") else []
    options += ["--kv-bits", str(given["kv_bits"])] if given.get("kv_bits") else []
    args = parse(["--model", folder, "--no-store", *options])
    # As mlx-lm's own parser would have made them.
    vars(args).update((name, value) for name, value in given.items() if name not in MODELS)
    prompt_cache.generator = generator = make_generator(BlockpoolModelProvider(args))
    if not fails:
        generator.wait_until_loaded()
    return generator


def prompt_cache(*args: Any, **kwargs: Any) -> Any:
    """LRUPromptCache() of a server; where its own limits are tested it is mlx-lm's."""
    return stock.LRUPromptCache(*args, **kwargs) if args or kwargs else ServedPrefixes()


NAMES = {
    "ResponseGenerator": response_generator,
    "APIHandler": BlockpoolHandler,
    "LRUPromptCache": prompt_cache,
}
