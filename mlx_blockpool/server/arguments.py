"""mlx-lm's generation arguments, from a body whose sampling fields Anthropic's and OpenAI's Responses API name alike."""

from __future__ import annotations

from typing import Any

from ..mlx_lm_compat import GenerationArguments, LogitsProcessorArguments, ModelDescription, SamplingArguments
from .fields import InvalidRequestError, field, number


def generation_arguments(
    body: dict[str, Any], options: Any, model: str, max_tokens: int, stop_words: list[str], kwargs: dict[str, Any]
) -> GenerationArguments:
    """The body's sampling, and the server's `options` for fields that it leaves out; `kwargs` are the template's.

    Raises InvalidRequestError.
    """
    top_k = field(body, "top_k", "", int, options.top_k)
    if top_k < 0:
        raise InvalidRequestError("top_k", "Input should be greater than or equal to 0")
    return GenerationArguments(
        model=ModelDescription(model=model, draft="default_model", adapter=None),
        sampling=SamplingArguments(
            temperature=number(body, "temperature", options.temp, 0),
            top_p=number(body, "top_p", options.top_p, 0, 1),
            top_k=top_k,
            min_p=options.min_p,
            xtc_probability=0.0,
            xtc_threshold=0.1,
        ),
        logits=LogitsProcessorArguments(None, 0.0, 20, 0.0, 20, 0.0, 20),
        stop_words=stop_words,
        max_tokens=max_tokens,
        num_draft_tokens=options.num_draft_tokens,
        logprobs=False,
        top_logprobs=-1,
        seed=None,
        chat_template_kwargs=kwargs or None,
    )
