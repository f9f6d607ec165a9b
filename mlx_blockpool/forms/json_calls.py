"""Tool calls that are JSON, or that hold their arguments as JSON, as mlx-lm's parsers read them.

Each family is a function that returns Lark of one call: of a function's name, the exact schema of
its parameters and its place.
"""

from __future__ import annotations

import json
import keyword
import unicodedata
from collections.abc import Callable

from .lark import Lark, quoted, slashed
from .parameters import fenced
from .schema import JsonSchema, Schema, SchemaError, both, constants, placed

SPACE = r"/[ \t\r\n]{0,8}/"
# In Python's strings the other escapes of JSON mean something else.
PYTHON_ESCAPES = '"\\bfnrt'
# Functions' names that Python reads as such.
PYTHON_NAMES = (
    rf"(?:(?!(?:{'|'.join(keyword.kwlist)})(?:\.|\Z))[A-Za-z_][A-Za-z0-9_]*(?:\.(?!\Z)|\Z))+"
)
# Keywords of a schema that say more about an object than which properties it has.
OF_OBJECTS = (
    "anyOf",
    "allOf",
    "patternProperties",
    "minProperties",
    "maxProperties",
    "enum",
    "const",
)


def json_tools(lark: Lark, name: str, schema: JsonSchema, place: str) -> str:
    """`{"name": "f", "arguments": {..}}`, and space around it."""
    space = lark.terminal(SPACE)
    return f"{space} {_json_call(lark, name, _without(lark, schema, '</tool_call>'))} {space}"


def mistral_list(lark: Lark, name: str, schema: JsonSchema, place: str) -> str:
    """`{"name": "f", "arguments": {..}}` in a list, with an id or without."""
    return _json_call(lark, name, schema, lark.terminal(r'/, ?"id": ?"[A-Za-z0-9]{9}"/'))


def mistral(lark: Lark, name: str, schema: JsonSchema, place: str) -> str:
    """`f[ARGS]{..}`, where the tokenizer has the marker."""
    return f"{lark.literal(f'{name}[ARGS]')} {lark.json(_object(schema))}"


def kimi_k2(lark: Lark, name: str, schema: JsonSchema, place: str) -> str:
    """`<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{..}<|tool_call_end|>`; the
    number counts a chat's calls.
    """
    begin, end = lark.literal(f"<|tool_call_begin|>functions.{name}:"), "<|tool_call_end|>"
    number = f"{lark.terminal('/[0-9]{1,4}/')} {lark.literal('<|tool_call_argument_begin|>')}"
    # The parser finds the end by its text.
    return f"{begin} {number} {lark.json(fenced(_object(schema), end))} {lark.literal(end)}"


def pythonic(lark: Lark, name: str, schema: JsonSchema, place: str) -> str:
    """`f(a="text", b=[1, 2])`, with values that are JSON or Python's True, False and None."""
    whole, written = Schema(schema), dict[str, str]()

    def value(each: JsonSchema, place: str) -> str:
        if (shown := json.dumps(each)) not in written:
            with placed(place):
                written[shown] = _python_value(lark, each, whole)
        return written[shown]

    arguments = members(
        lark,
        whole,
        schema,
        place,
        is_name=_is_argument,
        why="this model's calls need Python's names of arguments",
        more=f"/[A-Za-z_][A-Za-z0-9_]{{0,63}}/ & ~/{'|'.join(['__debug__', *keyword.kwlist])}/",
        colon="=",
        comma=lark.terminal("/, ?/"),
        value=value,
    )
    return f"{lark.literal(f'{name}(')} {arguments} {lark.literal(')')}"


def members(
    lark: Lark,
    whole: Schema,
    schema: JsonSchema,
    place: str,
    *,
    is_name: Callable[[str], bool],
    why: str,
    more: str,
    colon: str,
    comma: str,
    value: Callable[[JsonSchema, str], str],
) -> str:
    """Lark of an object's properties in their order, those left out that are not required, and
    others where the schema allows them.

    is_name: whether a property of this name can be written; SchemaError says `why` not.
    more:    the names of undeclared properties.
    colon:   what stands after a name. comma: Lark of what stands between two properties.
    value:   Lark of the values of a schema at its place.
    """
    declared, rest = parameters(schema, whole, place)
    parts = []
    for key, (required, each) in declared.items():
        at = f"{place}.properties.{key}"
        if not is_name(key):
            raise SchemaError(why, at)
        parts.append((required, f"{lark.literal(f'{key}{colon}')} {value(each, at)}"))
    if rest is not False:
        keys = lark.terminal(" & ".join([more, *(f"~{slashed(quoted(key))}" for key in declared)]))
        pair = f'{keys} "{colon}" {value(rest, f"{place}.additionalProperties")}'
        one = lark.rule(pair)
        parts.append((False, lark.rule(f"{one} ({comma} {one})*")))
    # From the last one to the first: what is written after nothing, and after another property.
    first, following = '""', '""'
    for required, part in reversed(parts):
        begun, joined = f"{part} {following}", f"{comma} {part} {following}"
        first, following = (
            lark.rule(way if required else f"{way} | {without}")
            for way, without in ((begun, first), (joined, following))
        )
    return first


def parameters(
    schema: JsonSchema, whole: Schema, place: str
) -> tuple[dict[str, tuple[bool, JsonSchema]], JsonSchema]:
    """The properties of an object by their names, each with whether it is required, and the schema
    of others.

    Others are for objects that declare none or say what others are: a model that may write any more
    does not stop there. Raises SchemaError for schemas that say more about an object than which
    properties it has.
    """
    held = whole.resolve(schema)
    if isinstance(held, bool):
        return {}, held
    if "object" not in whole.types(held):
        raise SchemaError("the parameters of a function are an object", f"{place}.type")
    said = next((key for key in OF_OBJECTS if key in held), None)
    if said is not None:
        raise SchemaError(
            f"{said} is not supported here by this model's tool calls", f"{place}.{said}"
        )
    required, properties = held.get("required", []), held.get("properties", {})
    declared = {
        name: (name in required, properties.get(name, True)) for name in (*properties, *required)
    }
    return declared, held.get("additionalProperties", "properties" not in held and not declared)


def _is_argument(name: str) -> bool:
    """Whether Python reads an argument of this name as it is written."""
    is_name = name.isidentifier() and not keyword.iskeyword(name)
    return is_name and unicodedata.normalize("NFKC", name) == name


def _python_value(lark: Lark, schema: JsonSchema, whole: Schema) -> str:
    held = _without(
        lark, whole.standalone(schema) if isinstance(schema, dict) else schema, "<|tool_call_end|>"
    )
    free = [
        each for each in whole.branches(schema) if constants(each) is None and "allOf" not in each
    ]
    allowed = frozenset[str]().union(*map(whole.types, free))
    # Python's own words for values that a parameter may have.
    words = [
        *(['"True"', '"False"'] if "boolean" in allowed else []),
        *(['"None"'] if "null" in allowed else []),
    ]
    return lark.rule(" | ".join([lark.json(held, json_allowed_escapes=PYTHON_ESCAPES), *words]))


def _json_call(lark: Lark, name: str, schema: JsonSchema, more: str = "") -> str:
    """A call as a JSON object. `more`: what may follow the arguments in it."""
    space = lark.terminal(SPACE)
    named = lark.literal(json.dumps(name, ensure_ascii=False))
    parts = ['"{"', r'"\"name\""', '":"', named, '","', r'"\"arguments\""', '":"']
    held = f"{lark.json(_object(schema))} {f'({more})?' if more else ''}"
    return f" {space} ".join([*parts, held, '"}"'])


def _object(schema: JsonSchema) -> JsonSchema:
    """The same parameters, which are an object."""
    return (
        schema if Schema(schema).types(schema) == {"object"} else both(schema, {"type": "object"})
    )


def _without(lark: Lark, schema: JsonSchema, end: str) -> JsonSchema:
    """The same schema of JSON in which the marker that ends calls never stands.

    Where it is a token, JSON never has it.
    """
    return schema if end in lark.added else fenced(schema, end)
