"""What forms cost whose text is made to cost much: a second of processor time at most, and never
the process.
"""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from forms.schemas import compiled_as
from forms.vocabularies import vocabulary_of

from mlx_blockpool.forms.calls import FAMILIES, call_grammar
from mlx_blockpool.forms.exact import exact
from mlx_blockpool.forms.output_format import ToolFormat, check_schemas
from mlx_blockpool.forms.schema import SchemaError


def rules(count: int, nested: int) -> str:
    """A grammar whose rules lead from one to the next."""
    opened, closed = "(" * nested, ")" * nested
    lines = [f'a{n}: {opened}a{n + 1} "a" | "b"{closed}' for n in range(count)]
    return "\n".join(["start: a0", *lines, f'a{count}: "b"'])


def chain(count: int) -> str:
    """A grammar with a schema whose references lead from one to the next."""
    defs = {str(n): {"items": {"$ref": f"#/$defs/{n + 1}"}} for n in range(count)}
    return "start: %json " + json.dumps(
        {"$ref": "#/$defs/0", "$defs": {**defs, str(count): {}}}, separators=(",", ":")
    )


@pytest.mark.parametrize(
    "grammar", [rules(900, 27), pytest.param(chain(1_600), marks=pytest.mark.thorough)]
)
def test_a_grammar_of_the_deepest_rules_does_not_end_the_process(grammar: str) -> None:
    matcher = compiled_as("grammar", grammar, "grammar")
    assert matcher.deep_copy().consume_token(ord("b" if "%json" not in grammar else "["))


@pytest.mark.parametrize("space", ["", " ", "\n\n\t"])
def test_schemas_in_a_grammar_are_refused_as_others_are(space: str) -> None:
    check_schemas(f'start: %json{space}{{"type": "null"}} "%json" // as %json says', "grammar")
    with pytest.raises(SchemaError, match=r"^grammar: %json.items.not: not is not supported$"):
        check_schemas(
            f'start: "a" %json{space}{{"type": "array", "items": {{"not": {{}}}}}}', "grammar"
        )
    with pytest.raises(SchemaError, match="references followed"):
        check_schemas(chain(300), "grammar")


def test_a_reference_to_an_item_of_a_large_number_names_nothing() -> None:
    with pytest.raises(SchemaError, match="names nothing in the schema"):
        exact({"anyOf": [{"$ref": "#/anyOf/" + "9" * 5_000}]}, "schema")


SHARED = {
    "type": "object",
    "properties": {f"q{n}": {"type": "string", "maxLength": n} for n in range(300)},
}
BAD = {"type": "string", "pattern": "^(a$|^b)"}


def many(names: int, **more: Any) -> dict[str, Any]:
    properties = {f"p{n}": {"$ref": "#/$defs/shared"} for n in range(names)} | more
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "$defs": {"shared": SHARED},
    }


@pytest.mark.parametrize("parser", ["gemma4", "pythonic", "qwen3_coder"])
@pytest.mark.parametrize("schema", [many(1_500), many(300, bad=BAD)])
def test_parameters_of_one_schema_cost_as_much_as_one(parser: str, schema: Any) -> None:
    tool = ToolFormat("f", json.dumps(exact(schema, "tools[0]")), None)
    started = time.process_time()
    call_grammar(parser, [tool], vocabulary_of("bpe"))
    assert time.process_time() - started < 1


def test_groups_of_a_pattern_are_found_in_one_pass() -> None:
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": "string", "pattern": "^" + "(" * 20_000 + "a|b" + ")" * 20_000 + "$"}
        },
    }
    tool = ToolFormat("f", json.dumps(exact(schema, "tools[0]")), "tools[0]")
    started = time.process_time()
    for parser in FAMILIES:
        call_grammar(parser, [tool], vocabulary_of("bpe"))
    assert time.process_time() - started < 1
