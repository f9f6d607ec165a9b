"""Request bodies as pydantic models. Errors name their field by its place in the body, such as `messages.1.content.0.text`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, FailFast, Field, InstanceOf, Tag, ValidationError, model_validator

from .fields import LARGEST, InvalidRequestError

M = TypeVar("M", bound="Body")

# Text as JSON has it: pydantic's own strings must be UTF-8, and a client's may have half of a surrogate pair.
Text = InstanceOf[str]
Int = Annotated[int, Field(ge=-LARGEST, le=LARGEST)]
KINDS = {"str": "string", "dict": "dictionary"}


class Body(BaseModel):
    """A JSON object. A field that is null counts as left out, and fields that the model does not have are ignored."""

    model_config = ConfigDict(strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        return {name: item for name, item in value.items() if item is not None} if isinstance(value, dict) else value


def tag(name: str) -> Tag:
    """A member of a union. The brackets tell it from a field's name in the places of errors."""
    return Tag(f"<{name}>")


def by(field: str, default: str) -> Discriminator:
    """Tells the objects of a union apart by a field, whose values are the tags. `default`: the member that rejects the rest."""

    def name_of(value: Any) -> str | None:
        if not isinstance(value, dict):
            return f"<{default}>"
        return None if value.get(field) is None else f"<{value[field]}>"

    # pydantic's errors name the function.
    name_of.__name__ = field
    return Discriminator(name_of)


class _FailFast(FailFast):
    """With a hash, which unions ask of their members."""

    __hash__ = object.__hash__


# Of a list: report its first error only.
FAIL_FAST = _FailFast()
# For a union of text and a list, with these tags.
TEXT_OR_LIST = Discriminator(lambda value: "<text>" if isinstance(value, str) else "<list>")


def validated(model: type[M], value: Any, place: Callable[[Sequence[Any]], str]) -> M:
    """The model of a body. `place`: writes the path of a field. Raises InvalidRequestError for the first thing that is wrong."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    path = [part for part in first["loc"] if not str(part).startswith("<")]
    context, message = first.get("ctx", {}), str(first["msg"])
    if first["type"] in ("union_tag_not_found", "union_tag_invalid"):
        path.append(context["discriminator"].strip("'()"))
        message = "Field required"
        if "tag" in context:
            names = context["expected_tags"].replace("<", "").replace(">", "").replace(", ", " or ")
            message = f"Input should be {names}; found {context['tag'][1:-1][:50]!r}"
    elif first["type"] == "value_error":
        message = str(context["error"])
    elif first["type"] == "model_type":
        message = "Input should be a valid dictionary"
    elif first["type"] == "is_instance_of":
        message = f"Input should be a valid {KINDS.get(context['class'], context['class'])}"
    raise InvalidRequestError(place(path), message)


def dotted(path: Sequence[Any]) -> str:
    """`messages.1.content`, as Anthropic writes the place of a field."""
    return ".".join(map(str, path))
