"""Tags: how the models of each parser write tool calls in tags, and where their templates write
space.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

# The call that a template renders, to see where it writes space and whether it sorts arguments.
SAMPLE_NAME = "sample_function"
SAMPLE = {"key_b": "A1B2", "key_a": "C3D4"}


@dataclass(frozen=True)
class Tags:
    """How the models of one parser write a call. `~` is where some templates write space; line ends
    are what most write there.

    begin, key, close, finish: around the name, before and after each value, and after the last.
    lead:       before the first call after a marker.
    last:       `close` of the last value; "": as of the others.
    takes:      what the parser takes off on both sides of a value: "space", one "line" end, or
                nothing.
    bans:       what would end a call wherever it stands.
    nulls:      whether the parser reads null, in capitals too, from any text.
    reads_json: whether the parser reads JSON from any text.
    section:    what may stand around text; empty: nothing.
    empty:      whether a call without arguments is written as JSON.
    """

    begin: str
    key: str
    close: str
    finish: str = ""
    lead: str = ""
    last: str = ""
    takes: str = "space"
    bans: tuple[str, ...] = ()
    nulls: bool = False
    reads_json: bool = False
    section: tuple[str, str] = ("", "")
    empty: bool = False

    def spelled(self, sample: str) -> Tags:
        """The same tags with space between them as in a template's sample call, and none at `~`
        where it has another form.
        """
        space = r"(\n?)" if self.takes == "line" else r"(\s{0,8})"
        begin = self.begin.replace("{name}", SAMPLE_NAME).replace("{index}", "1")
        key = self.key.replace("{type}", "string")
        for one, other in (SAMPLE, sorted(SAMPLE)):
            # The fields in the order in which a call has them, and what it has of them.
            written = {
                "lead": self.lead,
                "begin": begin,
                "key": key.replace("{key}", one) + SAMPLE[one],
                "close": self.close,
                "": key.replace("{key}", other) + SAMPLE[other],
                "last": self.close,
                "finish": self.finish,
            }
            pattern = re.sub(r"\\[~\n]", lambda _: space, re.escape("".join(written.values())))
            if match := re.search(pattern, sample):
                found = iter(match.groups())
                spelled: dict[str, Any] = {
                    name: re.sub(
                        "[~\n]", lambda _, found=found: next(found), getattr(self, name, "") or text
                    )
                    for name, text in written.items()
                }
                del spelled[""]
                return replace(self, **spelled)
        plain = {
            name: getattr(self, name).replace("~", "")
            for name in ("lead", "begin", "key", "close", "finish")
        }
        return replace(self, **plain)

    @property
    def closes(self) -> list[str]:
        """What may come after a value, `close` first."""
        return list(dict.fromkeys((self.close, self.last or self.close)))

    @property
    def marks(self) -> list[str]:
        """What must not stand in a value, the closing tag first: beginnings of tags in which
        their first character comes once.
        """
        words = [self.close.strip(), *self.bans]
        return [
            word[: again if (again := word.find(word[0], 1)) > 0 else len(word)] for word in words
        ]


TAGS = {
    "glm47": Tags("{name}~", "<arg_key>{key}</arg_key>~<arg_value>", "</arg_value>~"),
    "kimi_k3": Tags(
        '<|open|>call tool="{name}" index="{index}"<|sep|>',
        '<|open|>argument key="{key}" type="{type}"<|sep|>',
        "<|close|>argument<|sep|>",
        "<|close|>call<|sep|>",
        takes="",
        bans=("<|open|>", "<|close|>"),
    ),
    "longcat": Tags(
        "{name}\n",
        "<longcat_arg_key>{key}</longcat_arg_key>\n<longcat_arg_value>",
        "</longcat_arg_value>\n",
        empty=True,
    ),
    "minicpm5": Tags(
        '"{name}">~',
        '<param name="{key}">',
        "</param>~",
        bans=("</function>", "<![CDATA["),
        nulls=True,
        section=("<![CDATA[", "]]>"),
    ),
    "minimax_m2": Tags(
        '<invoke name="{name}">\n',
        '<parameter name="{key}">~',
        "~</parameter>\n",
        "</invoke>\n",
        lead="\n",
        bans=("</invoke>",),
        nulls=True,
    ),
    "muse_spark": Tags(
        '<atem:invoke name="{name}">\n',
        '<atem:parameter name="{key}">',
        "</atem:parameter>\n",
        "</atem:invoke>\n",
        lead="\n",
        bans=("</atem:invoke>",),
        reads_json=True,
    ),
    "qwen3_coder": Tags(
        "<function={name}>\n",
        "<parameter={key}>\n",
        "\n</parameter>\n",
        "</function>\n",
        lead="\n",
        takes="line",
        nulls=True,
    ),
}
