"""The tools of OpenAI's Responses API in the chat's shape, and the names under which their calls go back.

Functions in a namespace are shown to the model as functions with longer names. Tools that OpenAI's servers run are left out.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..fields import InvalidRequestError, checked
from ..fields import field as field_of

log = logging.getLogger(__name__)

Tool = dict[str, Any]
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True)
class Name:
    """A client's name for a function. `namespace`: None outside of any."""

    name: str
    namespace: str | None = None

    @property
    def flat(self) -> str:
        """The model's name for it."""
        if not self.namespace:
            return self.name
        between = "" if self.namespace.endswith("_") else "__"
        return f"{self.namespace}{between}{self.name}"


@dataclass
class Tools:
    """`shown`: functions in the chat's shape. `left_out`: the types of tools that are none."""

    shown: list[Tool] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    _names: dict[str, Name] = field(default_factory=dict)

    def add(self, tools: list[Any], place: str, namespace: str | None = None) -> None:
        """Raises InvalidRequestError."""
        for i, tool in enumerate(tools):
            at = f"{place}[{i}]"
            kind = field_of(checked(tool, dict, at), "type", at, str)
            if kind == "function":
                self._add_function(tool, at, namespace)
            elif kind == "namespace" and namespace is None:
                self.add(field_of(tool, "tools", at, list), f"{at}.tools", field_of(tool, "name", at, str))
            else:
                self.left_out.append(kind[:50])

    def _add_function(self, tool: Tool, at: str, namespace: str | None) -> None:
        name = Name(field_of(tool, "name", at, str), namespace)
        if self._names.setdefault(name.flat, name) != name:
            raise InvalidRequestError(
                f"{at}.name", f"{name.flat[:80]!r} is the name of another function too; needed different names"
            )
        function = {"name": name.flat}
        description = field_of(tool, "description", at, str, None)
        if description is not None:
            function["description"] = description
        function["parameters"] = field_of(tool, "parameters", at, dict, NO_PARAMETERS)
        self.shown.append({"type": "function", "function": function})

    def names(self) -> Mapping[str, Name]:
        """What the client calls what the model has called; also by its own name alone, where only one function has it."""
        counts = Counter(name.name for name in self._names.values())
        alone = {name.name: name for name in self._names.values() if counts[name.name] == 1}
        return {**alone, **self._names}

    def chosen(self, name: Name) -> list[Tool]:
        """The one function of that name, or none."""
        flat = self.names().get(name.flat, name).flat
        return [tool for tool in self.shown if tool["function"]["name"] == flat]


def tools_of(body: dict[str, Any]) -> Tools:
    """The tools of a request. Raises InvalidRequestError."""
    tools = Tools()
    tools.add(field_of(body, "tools", "", list, []), "tools")
    if tools.left_out:
        kinds = ", ".join(dict.fromkeys(tools.left_out))
        log.info("left out tools that only a vendor's servers run, or that are no functions: %s", kinds)
    return tools
