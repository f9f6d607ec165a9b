"""Request bodies as pydantic models: the types that several protocols share, and errors that name
the field that is wrong.

An error says where the field is, such as `messages[1].content`, what is needed, and what was found.
Lists fail fast: collecting every error of a large body would hold up other threads.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from typing import Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    FailFast,
    Field,
    InstanceOf,
    Tag,
    ValidationError,
    create_model,
    model_validator,
)

from ..config import RequestConfig
from ..mlx_lm_compat import (
    GenerationArguments,
    LogitsProcessorArguments,
    ModelDescription,
    SamplingArguments,
)
from .bodies import InvalidRequestError, Json

log = logging.getLogger(__name__)

B = TypeVar("B", bound="Body")
T = TypeVar("T")

# mlx takes integers of 64 bits; Python's may be larger.
LARGEST = 2**63 - 1


class _FailFast(FailFast):
    """Hashable, because pydantic hashes the members of unions."""

    __hash__ = object.__hash__


# Text as JSON has it: pydantic's own strings must be UTF-8, and a client's may have half of a
# surrogate pair.
Text = InstanceOf[str]
Object = InstanceOf[Json]
Int = Annotated[int, Field(ge=-LARGEST, le=LARGEST)]
Count = Annotated[Int, Field(ge=0)]
Number = Annotated[float, Field(ge=-LARGEST, le=LARGEST, allow_inf_nan=False)]
NotNegative = Annotated[Number, Field(ge=0)]
Share = Annotated[Number, Field(ge=0, le=1)]
TopLogprobs = Annotated[Int, Field(ge=0, le=RequestConfig.top_logprobs)]
List = Annotated[list[T], _FailFast()]
Salt = Annotated[Text, Field(min_length=1, max_length=RequestConfig.salt_characters)]
# Of the tokens of a vocabulary.
Token = Annotated[Int, Field(ge=0, lt=2**31)]
Positive = Annotated[Int, Field(ge=1)]
# The tags of a union have brackets, which no field's name in the places of errors has.
IS_TEXT = Discriminator(lambda value: "<text>" if isinstance(value, str) else "<other>")
TextOr = Annotated[Annotated[Text, Tag("<text>")] | Annotated[T, Tag("<other>")], IS_TEXT]


def only(*values: Any, why: str) -> AfterValidator:
    """Rejects all other values of a field: `why` the reply cannot honour them."""

    def check(value: Any) -> Any:
        if value not in values:
            raise ValueError(f"{_short(value)} is not supported; {why}")
        return value

    return AfterValidator(check)


def known(values: Collection[str], place: str) -> AfterValidator:
    """Other values, which newer versions of the protocol may have, are logged and count as None."""

    def check(value: str) -> str | None:
        if value in values:
            return value
        log.info("%s: %r is not known here and has no effect", place, value[:50])
        return None

    return AfterValidator(check)


def _few(biases: Any) -> Any:
    # pydantic would list the errors of all of them.
    if isinstance(biases, dict) and len(biases) > RequestConfig.logit_bias:
        raise ValueError(
            f"a request may have {RequestConfig.logit_bias:,} of them; this one has {len(biases):,}"
        )
    return biases


class Body(BaseModel):
    """A JSON object.

    A field that is null counts as left out, and fields that the model does not have are ignored.
    """

    model_config = ConfigDict(strict=True, frozen=True, defer_build=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        return (
            {name: item for name, item in value.items() if item is not None}
            if isinstance(value, dict)
            else value
        )


class Serving(Body):
    """Fields of every protocol for serving a request among others.

    cache_salt: only requests with the same one share their prefixes. priority: lower values are
    served earlier.
    """

    cache_salt: Salt | None = None
    priority: Int | None = None


class Sampling(Serving):
    """Fields for the model, and for drawing and sending tokens.

    The server's options replace those that are None.
    """

    stream: bool = False
    model: Text = "default_model"
    temperature: NotNegative | None = None
    top_p: Share | None = None
    top_k: Count | None = None


class AllSampling(Sampling):
    """Everything that mlx-lm's server reads in addition to the prompt, with its defaults."""

    draft_model: Text = "default_model"
    adapters: Text | None = None
    num_draft_tokens: Count | None = None
    min_p: Share | None = None
    xtc_probability: Share = 0.0
    xtc_threshold: Share = 0.1
    repetition_penalty: NotNegative = 0.0
    repetition_context_size: Count = 20
    presence_penalty: Number = 0.0
    presence_context_size: Count = 20
    frequency_penalty: Number = 0.0
    frequency_context_size: Count = 20
    logit_bias: (
        Annotated[dict[Annotated[Int, Field(strict=False)], Number], BeforeValidator(_few)] | None
    ) = None
    logprobs: bool = False
    top_logprobs: Annotated[Int, Field(ge=-1, le=RequestConfig.top_logprobs)] = -1
    seed: Annotated[int, Field(ge=-LARGEST, lt=2**64)] | None = None


# Where a request gives arguments to its chat template.
PLACE = "chat_template_kwargs"
Line = Annotated[Text, Field(max_length=4096)]
# Arguments that templates of well-known models read, in addition to messages and tools, by the type
# of their values.
SWITCHES: dict[Any, str] = {
    bool: "add_vision_id clear_thinking enable_citations enable_thinking force_reasoning "
    "keep_past_thinking low_effort "
    "preserve_thinking tools_in_user_message",
    list[Any]: "available_tools builtin_tools custom_tools documents python_tools xml_tools",
    Json: "controls",
    Line: "citation_mode current_date date_string model_identity reasoning_effort safety_mode "
    "thinking_mode today",
    bool | Line: "thinking",
    Int: "thinking_budget",
}
# None leaves an argument to the template.
SWITCH_FIELDS: dict[str, Any] = {
    name: (kind | None, None) for kind, names in SWITCHES.items() for name in names.split()
}
Switches = create_model("Switches", __base__=Body, **SWITCH_FIELDS)


def dotted(path: Sequence[Any]) -> str:
    """`messages.1.content`, as Anthropic writes the place of a field."""
    return ".".join(str(part)[:50] for part in path)


def indexed(path: Sequence[Any]) -> str:
    """`messages[1].content`, as OpenAI writes the place of a field."""
    return "".join(
        f"[{part}]" if isinstance(part, int) else f".{part[:50]}" for part in path
    ).removeprefix(".")


def validated(model: type[B], value: Any, place: Callable[[Sequence[Any]], str] = indexed) -> B:
    """The model of a body.

    `place`: writes the path of a field. Raises InvalidRequestError for the first thing that is
    wrong.
    """
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first: Any = error.errors(include_url=False)[0]
    places = first["loc"]
    context = first.get("ctx", {})
    kind = first["type"]
    message = str(first["msg"])
    if kind in ("union_tag_not_found", "union_tag_invalid"):
        places += (context["discriminator"].strip("'()"),)
        message = "Field required"
        if "tag" in context:
            names = " or ".join(context["expected_tags"].split(", "))
            message = f"Input should be {names}; found {_short(context['tag'])}"
    elif kind == "value_error":
        message = str(context["error"])
    elif kind == "too_short":
        message = "Input should not be empty"
    elif kind == "too_long":
        found = context["actual_length"]
        message = f"Input should have a length of at most {context['max_length']:,}" + (
            f"; found {found:,}" if found else ""
        )
    elif kind != "missing":
        if kind in ("is_instance_of", "model_type", "model_attributes_type"):
            message = (
                "Input should be a valid "
                f"{'string' if context.get('class') == 'str' else 'dictionary'}"
            )
        message = f"{message}; found {_short(first['input'])}"
    raise InvalidRequestError(place(_path(places, value)), message)


def _path(places: Sequence[Any], value: Any) -> list[Any]:
    """The way to a field of the body `value`, without the tags of unions and keys that
    pydantic's `places` have.
    """
    path = []
    for part, after in pairwise(places):
        is_key = (
            part in value
            if isinstance(value, dict)
            else isinstance(value, list) and isinstance(part, int)
        )
        is_tag = isinstance(value, dict) and part == value.get("type") and after in value
        if is_key and not is_tag:
            path.append(part)
            value = value[part]
    return [*path, *(part for part in places[-1:] if not str(part).startswith(("<", "[")))]


def _short(value: Any) -> str:
    """A value as an error shows it."""
    if isinstance(value, dict | list):
        return "a dictionary" if isinstance(value, dict) else "a list"
    return repr(value[:50] if isinstance(value, str) else value)[:60]


def generation_arguments(
    body: Sampling,
    options: Any,
    max_tokens: int,
    stop_words: list[str],
    template: Json | None,
) -> GenerationArguments:
    """mlx-lm's arguments for a body, and the server's `options` for what the body leaves open.

    `template`: arguments of the chat template.
    """
    values = {name: field.default for name, field in AllSampling.model_fields.items()}
    values |= {
        name: getattr(options, name) for name in ("top_p", "top_k", "min_p", "num_draft_tokens")
    }
    values |= {"temperature": options.temp} | {
        name: value for name, value in body if value is not None
    }

    def part(kind: Any) -> Any:
        return kind(**{field.name: values[field.name] for field in dataclasses.fields(kind)})

    values |= {
        "max_tokens": max_tokens,
        "stop_words": stop_words,
        "chat_template_kwargs": template or None,
    }
    model = ModelDescription(values["model"], values["draft_model"], values["adapters"])
    values |= {
        "model": model,
        "sampling": part(SamplingArguments),
        "logits": part(LogitsProcessorArguments),
    }
    return part(GenerationArguments)


def check_bounds(request: Any, args: Any) -> None:
    """Raises InvalidRequestError with the field whose size would delay other requests."""
    counts = {
        "messages": (request.messages, RequestConfig.messages),
        "tools": (request.tools or (), RequestConfig.tools),
        "logit_bias": (args.logits.logit_bias or (), RequestConfig.logit_bias),
        "stop": (args.stop_words, RequestConfig.stop_words),
    }
    for place, (values, most) in counts.items():
        if len(values) > most:
            raise InvalidRequestError(
                place, f"a request may have {most:,} of them; this one has {len(values):,}"
            )
    longest = max(map(len, args.stop_words), default=0)
    if longest > RequestConfig.stop_characters:
        raise InvalidRequestError(
            "stop",
            f"a stop string may have {RequestConfig.stop_characters:,} characters; this one has "
            f"{longest:,}",
        )


def check_template_options(options: Json | None, allowed: tuple[str, ...] | None) -> None:
    """Raises InvalidRequestError, with the name of the option, for an option that a request may not
    have.

    `allowed`: further names, with any value. None allows any name. All other arguments of a
    tokenizer's apply_chat_template(), such as a template, padding or lengths, are the operator's.
    """
    given = {
        name: value
        for name, value in (options or {}).items()
        if allowed is not None and name not in allowed
    }
    for name in given.keys() - Switches.model_fields.keys():
        raise InvalidRequestError(
            f"{PLACE}.{name[:50]}",
            "requests may not give templates this argument; start the server with "
            f"--allow-template-kwargs {name[:50]} "
            f"to let them. They may give {', '.join(sorted(Switches.model_fields))}.",
        )
    validated(Switches, given, lambda path: f"{PLACE}.{path[0]}")
