"""Grammars of tool calls, one for each of mlx-lm's tool parsers, and the arguments of parsed
calls in their schemas' types.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from ..config import FormConfig
from ..errors import FormError
from .gemma_calls import function_gemma, gemma4
from .json_calls import PYTHON_NAMES, json_tools, kimi_k2, mistral, mistral_list, pythonic
from .lark import Lark
from .output_format import ToolFormat
from .parameters import decode
from .schema import JsonSchema, Schema, SchemaError, placed, without_refused
from .tag_calls import tag_call
from .tags import SAMPLE, TAGS, Tags
from .vocabulary import Vocabulary

Tool = dict[str, Any]
# The types of parameters by their names, by the name of their function.
Parameters = dict[str, dict[str, frozenset[str]]]
# How much of a reply a grammar is of: one call, the calls between one pair of markers, all that
# follows the first marker, or all of the reply, with its markers and its text.
Extent = Literal["call", "block", "reply", "text"]
# Lark of one call: the grammar that it joins, the function's name, the exact schema of its
# parameters and the schema's place.
Build = Callable[[Lark, str, JsonSchema, str], str]
# Between the end of a call's markers and the next call's.
BETWEEN = r"/[ \t\r\n]{0,4}/"
# Names that a parser reads back whatever they are; halves of surrogate pairs are not characters.
ANY_NAME = "[^\ud800-\udfff]+"
ANY_TEXT = "/(?s:.)*/"
ANY_OBJECT: dict[str, Any] = {"type": "object"}
# What unchecked schemas raise when a value is decoded.
UNREADABLE = (SchemaError, ValueError, TypeError, KeyError, AttributeError, RecursionError)


@dataclass(frozen=True)
class Family:
    """How the models of one parser write calls.

    start, end:  the parser's markers; without an end, calls last until the reply ends.
    build:       Lark of one call; tags instead for calls in tags.
    within:      what stands between calls inside one pair of markers; None where each call has its
                 own markers.
    opens, closes: Lark of what stands before the first and after the last call inside of the
    markers.
    names:       the functions' names that the parser reads back.
    """

    start: str
    end: str
    build: Build | Tags
    within: str | None = None
    opens: str = ""
    closes: str = ""
    names: str = r"[\w./:-]+"


FAMILIES: dict[str, Family] = {
    "function_gemma": Family(
        "<start_function_call>", "<end_function_call>", function_gemma, names=r"\w+"
    ),
    "gemma4": Family("<|tool_call>", "<tool_call|>", gemma4, names=r"[\w-]+"),
    "glm47": Family("<tool_call>", "</tool_call>", TAGS["glm47"]),
    "json_tools": Family("<tool_call>", "</tool_call>", json_tools, names=ANY_NAME),
    "kimi_k2": Family(
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        kimi_k2,
        "",
        names="[^<>\ud800-\udfff]+",
    ),
    "kimi_k3": Family("<|open|>tools<|sep|>", "<|close|>tools<|sep|>", TAGS["kimi_k3"], ""),
    "laguna": Family("<tool_call>", "</tool_call>", TAGS["glm47"]),
    "longcat": Family("<longcat_tool_call>", "</longcat_tool_call>", TAGS["longcat"]),
    "minicpm5": Family("<function name=", "</function>", TAGS["minicpm5"]),
    "minimax_m2": Family("<minimax:tool_call>", "</minimax:tool_call>", TAGS["minimax_m2"], ""),
    "mistral": Family("[TOOL_CALLS]", "", mistral, "[TOOL_CALLS]", closes=BETWEEN, names=r"[\w-]+"),
    "muse_spark": Family("<atem:function_calls>", "</atem:function_calls>", TAGS["muse_spark"], ""),
    "pythonic": Family(
        "<|tool_call_start|>", "<|tool_call_end|>", pythonic, ", ", '"["', '"]"', names=PYTHON_NAMES
    ),
    "qwen3_coder": Family("<tool_call>", "</tool_call>", TAGS["qwen3_coder"]),
}
# Of tokenizers without the marker that stands before arguments.
MISTRAL_LIST = Family(
    "[TOOL_CALLS]", "", mistral_list, ", ", '/ ?/ "["', f'"]" {BETWEEN}', names=ANY_NAME
)


def call_grammar(
    parser: str,
    tools: Sequence[ToolFormat],
    vocabulary: Vocabulary,
    spelling: str = "",
    extent: Extent = "reply",
) -> str:
    """Lark of what follows the marker that begins calls, the last end marker included.

    parser:    the module of mlx_lm.tool_parsers that reads the calls.
    tools:     arguments keep the schemas of strict ones, and those of the others where this
               parser's calls can.
    spelling:  a call as the model's own template writes it (`PreparedPrompt.call_spelling`); "": as
               most such models do.
    extent:    what is written: "call" one call, "block" the calls between one pair of markers,
               "reply" any number of calls, "text" any text, with such blocks in it.

    Raises FormError, with its place in the request's body.
    """
    family = FAMILIES.get(parser)
    if parser == "mistral" and "[ARGS]" not in vocabulary.added:
        family = MISTRAL_LIST
    if family is None:
        raise FormError("this model's tool calls cannot be held to a form")
    lark = Lark(vocabulary.added)
    lark.forces = all(_longest_run(tool) <= FormConfig.forced_bytes for tool in tools)
    within = None if extent == "call" else family.within
    build, opens = family.build, family.opens
    if isinstance(build, Tags):
        tags = build.spelled(spelling)
        opens = lark.literal(tags.lead)
        if family.end not in vocabulary.added and not any(ban in family.end for ban in tags.bans):
            # The end of calls is found by its text then.
            tags = replace(tags, bans=(*tags.bans, family.end))
        build = partial(tag_call, tags=tags, several=within is not None)
    if -1 < spelling.find(min(SAMPLE)) < spelling.find(max(SAMPLE)):
        tools = [
            replace(tool, schema=json.dumps(_ordered(json.loads(tool.schema), family)))
            for tool in tools
        ]
    spare = iter(range(FormConfig.loosened))
    calls = [
        call
        for index, tool in enumerate(tools)
        if (call := _call(lark, build, family, tool, index, spare))
    ]
    if not calls:
        raise FormError("this model cannot call functions of these names", "tools")
    call = lark.rule(" | ".join(calls))
    more = "" if within is None else f" ({lark.literal(within)} {call})*"
    block = lark.rule(f"{opens} {call}{more} {family.closes} {lark.literal(family.end)}")
    if extent == "text":
        # A lazy lexeme ends with the first marker, also inside of a token.
        lead = f"lead[lazy]: TEXT {lark.literal(family.start)}\nTEXT: {ANY_TEXT}\n"
        return lark.text(f"(lead {block})* TEXT") + lead
    if extent != "reply" or not family.end:
        return lark.text(block)
    return lark.text(f"{block} ({lark.terminal(BETWEEN)} {lark.literal(family.start)} {block})*")


def _longest_run(tool: ToolFormat) -> int:
    """What a call may force at most, about: the names of all parameters, each with the longest
    text of the schema.
    """
    schema = json.loads(tool.schema)
    names = schema.get("properties", {}) if isinstance(schema, dict) else {}
    # A schema has one constant for several parameters where they refer to it.
    texts = re.findall(r'"(?:[^"\\]|\\.)*"', tool.schema)
    return sum(map(len, names)) + len(names) * max(map(len, texts), default=0)


def _ordered(schema: Any, family: Family) -> Any:
    """A schema with its properties in the order of their names, those of inner objects too
    unless they are JSON between tags.
    """
    if not isinstance(schema, dict):
        return schema
    held = {
        key: _ordered(value, family) if not isinstance(family.build, Tags) else value
        for key, value in schema.items()
    }
    if isinstance(held.get("properties"), dict):
        held["properties"] = dict(sorted(held["properties"].items()))
    return held


def _call(
    lark: Lark, build: Build, family: Family, tool: ToolFormat, index: int, spare: Iterator[int]
) -> str | None:
    """Lark of a call of one tool; None where the tool is not strict and the parser cannot read its
    name back.

    spare: ends when other parameters have taken all that may be left out.
    """
    is_strict, place = tool.place is not None, tool.place or f"tools[{index}]"
    if not re.fullmatch(family.names, tool.name):
        if is_strict:
            # The name is next to the parameters in every protocol.
            at = f"{place.rpartition('.')[0] or place}.name"
            raise SchemaError(
                f"this model cannot call a function named {tool.name!r}: use letters, digits, _ "
                "and -",
                at,
            )
        return None

    def built(schema: JsonSchema) -> str:
        with placed(place):
            return lark.rule(build(lark, tool.name, schema, place))

    schema = json.loads(tool.schema)
    if is_strict or isinstance(schema, bool):
        return built(schema)
    loose = {
        "type": "object",
        **{key: schema[key] for key in ("properties", "required", "$defs") if schema.get(key)},
    }
    return (
        without_refused(schema, built, spare, place)
        or without_refused(loose, built, spare, place)
        or built(ANY_OBJECT)
    )


def loosened(tools: Sequence[ToolFormat]) -> tuple[ToolFormat, ...]:
    """The tools without the schemas of those that are not strict, for a grammar that would not
    compile with them.
    """
    return tuple(
        tool if tool.place is not None else replace(tool, schema=json.dumps(ANY_OBJECT))
        for tool in tools
    )


def argument_types(parser: str, tools: Sequence[Tool]) -> Parameters:
    """The types that the schemas of functions' parameters allow, which decide what the text of an
    argument in tags is; empty for a schema that cannot be read, and for other parsers.
    """
    found: Parameters = {}
    for tool in tools if writes_tags(parser) else ():
        # Tools are not checked.
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(name := function.get("name"), str):
            continue
        schema, types = function.get("parameters") or {}, dict[str, frozenset[str]]()
        whole = Schema(schema)
        with suppress(*UNREADABLE):
            properties: Any = whole.resolve(schema)
            properties = properties["properties"]
            for key in properties:
                types[key] = frozenset()
                with suppress(*UNREADABLE):
                    types[key] = whole.types(properties[key])
        found.setdefault(name, types)
    return found


def arguments(types: Mapping[str, frozenset[str]], parsed: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a parsed call: what parsers of tags return as raw text, in one of the types
    of its parameter.
    """
    return {
        key: decode(value, types[key]) if types.get(key) else value for key, value in parsed.items()
    }


def writes_tags(parser: str) -> bool:
    """Return whether a parser reads values as text between tags."""
    return parser in FAMILIES and isinstance(FAMILIES[parser].build, Tags)


def as_strings(types: Parameters) -> list[Tool]:
    """Tools to parse a call in tags with: every parameter is a string, so that the parser returns
    raw text.
    """
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "parameters": {
                    "type": "object",
                    "properties": {key: {"type": "string"} for key in keys},
                },
            },
        }
        for name, keys in types.items()
    ]
