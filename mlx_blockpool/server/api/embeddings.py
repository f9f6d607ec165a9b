"""POST /v1/embeddings, and Ollama's /api/embed and /api/embeddings: bodies, and vectors in the
shape of each protocol.

For one request, on the socket's thread.
"""

from __future__ import annotations

import base64
import struct
from typing import Annotated, Any, Literal

from pydantic import Field

from ...config import RequestConfig
from ...mlx_lm_compat import ModelDescription
from ..bodies import InvalidRequestError, StatusError
from ..embedding import NoEmbeddingsError, embed
from ..models.http import ModelsEndpoint
from ..models.queue import Claim
from ..preparation import PromptPreparation
from ..prompts.job import TokenizerJob
from ..validation import Body, List, Positive, Text, TextOr, Token, validated
from .endpoint import Endpoint
from .ollama_request import KeepAlive, Named

EMBEDDINGS = "/v1/embeddings"


class EmbeddingsBody(Body):
    """The body of OpenAI's endpoint.

    `input`: a text, texts, the tokens of a text, or the tokens of several texts.
    """

    model: Text = "default_model"
    input: Annotated[TextOr[List[Any]], Field(min_length=1)]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Positive | None = None


class TextsBody(Body):
    """The texts one by one, so that an error names the place of a text."""

    input: Annotated[List[TextOr[List[Token]]], Field(max_length=RequestConfig.texts)]


class EmbedBody(Named):
    """The body of Ollama's endpoints. /api/embeddings reads `prompt`."""

    input: TextOr[List[Text]] = ""
    prompt: Text = ""
    dimensions: Positive | None = None
    keep_alive: KeepAlive | None = None


def texts_of(given: Any) -> list[str | list[int]]:
    """The texts of an `input`, each as text or tokens. Raises InvalidRequestError."""
    several = (
        [given] if isinstance(given, str) or all(type(item) is int for item in given) else given
    )
    texts = validated(TextsBody, {"input": several}).input
    for i, text in enumerate(texts):
        if not text:
            raise InvalidRequestError(f"input[{i}]", "Input should not be empty")
    return texts


def vectors_of(
    handler: Any, model: str, texts: list[str | list[int]], size: int | None
) -> tuple[list[list[float]], int]:
    """A vector for each text of `handler`'s request, and the tokens of all texts. Loads the model
    if it is not loaded.

    Raises StatusError for a model without embeddings, and what embed(), loading a model and
    tokenizing raise.
    """
    generator = handler.scope.generator
    generator.registry.need_one_rank("input", "embeddings")
    wanted = ModelDescription(model, "default_model", None)
    key = generator.registry.find(wanted)
    handler.scope.check_model(key)
    tokens = tokens_of(generator.preparation, wanted, texts)
    if key not in generator.registry.loaded:
        ModelsEndpoint(generator).change(
            handler.scope, wanted, claim=Claim.of_request(handler.scope.page is None)
        )
    try:
        vectors = embed(handler.scope, key, tokens, size)
    except NoEmbeddingsError as error:
        name = generator.registry.catalog.id_of(key.model)
        advice = (
            "Name an embedding model in mlx-lm's format, and allow it with --allow-models, or run "
            "another server for one."
        )
        raise StatusError(501, f"{name} gives no embeddings: {error}. {advice}") from error
    return vectors, sum(map(len, tokens))


def tokens_of(
    preparation: PromptPreparation, model: ModelDescription, texts: list[str | list[int]]
) -> list[list[int]]:
    """The tokens of each text.

    Raises InvalidRequestError for a text without tokens and for too many in all.
    """
    found: list[list[int]] = []
    count = 0
    for i, text in enumerate(texts):
        parts: list[Any] = [text] if isinstance(text, str) else list(text)
        found.append(preparation.convert(TokenizerJob(parts=parts), model).tokens.tolist())
        count += len(found[i])
        if not found[i]:
            raise InvalidRequestError(f"input[{i}]", "Input should have at least one token")
        if count > RequestConfig.text_tokens:
            most = f"Input should have at most {RequestConfig.text_tokens:,} tokens in all"
            raise InvalidRequestError(
                "input", f"{most}; the first {i + 1:,} of {len(texts):,} texts have {count:,}"
            )
    return found


class EmbeddingsEndpoint(Endpoint):
    """Vectors for texts."""

    def embed(self) -> None:
        given = validated(EmbeddingsBody, self._body())
        vectors, count = vectors_of(
            self._handler, given.model, texts_of(given.input), given.dimensions
        )
        written: list[Any] = vectors
        if given.encoding_format == "base64":
            written = [
                base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
                for vector in vectors
            ]
        data = [
            {"object": "embedding", "index": i, "embedding": vector}
            for i, vector in enumerate(written)
        ]
        usage = {"prompt_tokens": count, "total_tokens": count}
        self._handler.send_json(
            200, {"object": "list", "data": data, "model": given.model, "usage": usage}
        )


ROUTES = (EmbeddingsEndpoint.route(EMBEDDINGS, EmbeddingsEndpoint.embed, "POST"),)
