"""Claude Code as a server sees it: one window's requests in their order, with what the server says
put back as it is done there.

Headers, fields and blocks of the main requests are those that 2.1.330 was recorded to send, with
shorter texts; titles, counts and sub-agents follow what earlier versions did. The first system
block has no nonce: it is the same in all requests of a conversation and, as its version ends in a
hash of the first user message, another one in the next (2.1.330.ca2, 2.1.330.62e). What a small
model would not do is written down: which tools are called after a reply, and what they return.
"""

from __future__ import annotations

import copy
import hashlib
import http.client
import json
from dataclasses import dataclass, field
from typing import Any

from server.serving import Client, at_once

Block = dict[str, Any]

EPHEMERAL: Block = {"cache_control": {"type": "ephemeral"}}
HEADERS = {
    "accept": "application/json",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,"
    "context-management-2025-06-27,effort-2025-11-24",
    "anthropic-dangerous-direct-browser-access": "true",
    "anthropic-version": "2023-06-01",
    "authorization": "Bearer any",
    "content-type": "application/json",
    "user-agent": "claude-cli/2.1.330 (external, sdk-cli)",
    "x-app": "cli",
    "x-claude-code-session-id": "bbc4ff50-0000-4000-8000-000000000000",
    "x-stainless-lang": "js",
    "x-stainless-retry-count": "0",
}
BILLING = "x-anthropic-billing-header: cc_version=2.1.330.{conversation}; cc_entrypoint=sdk-cli;"
IDENTITY = "You are a Claude agent, built on Anthropic's Claude Agent SDK."
INSTRUCTIONS = (
    "You are an interactive agent that helps users with software engineering tasks.\n\n# Tone\n"
    + "Only address the query at hand; no preamble and no summary unless the user asks for one. "
    * 2
    + "\n\n# Doing tasks\n"
    + "Read a file before you change it, follow its conventions, and run its tests afterwards. " * 2
    + "\n\n# Tools\n"
    + "Call several tools in one message where they do not depend on each other. " * 2
)
MEMORY = (
    "\n# Memory\n\nYou have a memory at `/home/ann/.claude/projects/{}/memory/`.\n\n"
    + "Before you save a memory, look for one that says the same. " * 2
)
ENVIRONMENT = (
    "# Environment\nYou have been invoked in the following environment: \n - Primary working "
    "directory: {}\n"
    " - Is a git repository: true\n - Platform: linux\n - Shell: bash\n\nSkills:\n- init\n"
)
SUB_NAMES = ["Glob", "Grep", "Read", "WebFetch"]
NAMES = [
    *SUB_NAMES,
    "Task",
    "Bash",
    "Edit",
    "Write",
    "NotebookEdit",
    "TodoWrite",
    "BashOutput",
    "KillShell",
]
CONTEXT = (
    "<system-reminder>\nAs you answer the user's questions, you can use the following context:\n# "
    "gitStatus\n"
    "This is the git status at the start of the conversation.\n\nCurrent branch: "
    "main\n\nStatus:\nM pool.py\n</system-reminder>"
)
TODO = (
    "<system-reminder>\nThis is a reminder that your todo list is currently empty. Do not mention "
    "it.\n</system-reminder>\n"
)
CHANGED = (
    "<system-reminder>\nNote: /home/ann/pool/pool.py was modified, by the user or by a "
    "linter.\n</system-reminder>\n"
)
FILE = "".join(f"{n:6}\tdef take_{n}(self): return self.free.pop({n})\n" for n in range(1, 4))


def tool(name: str) -> Block:
    """A definition of about the shape, if not the length, of the real ones."""
    schema = {"type": "object", "properties": {"target": {"type": "string"}}}
    return {"name": name, "description": f"{name}s a target.", "input_schema": schema}


def text(said: str) -> Block:
    return {"type": "text", "text": said}


@dataclass
class Reply:
    """What one streamed message said; `read`, `prompt`: cached tokens and all tokens of its
    prompt, by the protocol's usage.
    """

    id: str
    content: list[Block]
    read: int
    prompt: int


@dataclass
class Window:
    """One window of Claude Code that talks to `server`."""

    server: Client
    model: str = "default_model"
    first: str = "Why does the pool test fail?"
    reply_tokens: int = 24
    folder: str = "/home/ann/pool"
    replies: list[Reply] = field(default_factory=list)
    messages: list[Block] = field(default_factory=list)

    # -- the session -------------------------------------------------------------------------------

    def run(self, turns: int = 12) -> None:
        """The session: its first `turns` main requests, with all that is sent between them."""
        self.post(
            {
                "model": self.model,
                "max_tokens": 1,
                "messages": [{"role": "user", "content": "quota"}],
            }
        )
        self.title(self.first)
        for turn, (user, calls) in enumerate(zip(*self._script(), strict=True)):
            if turn == turns:
                break
            if turn == 4:
                at_once([lambda n=n: self.sub_agent(n) for n in range(2)])
            if turn % 5 == 1:
                self.count_tools()
            self.turn(user, calls)
        self.title("Thank you.")

    def _script(self) -> tuple[list[list[Block]], list[list[tuple[str, str]]]]:
        """What stands in each user turn, and which tools the assistant calls in answer to it."""
        users = [
            [text(CONTEXT), text(TODO), text(self.first)],
            ["/home/ann/pool/pool.py\n/home/ann/pool/test_pool.py", FILE],
            [f"{FILE}{TODO}"],
            ["pool.py:3: def take_3\npool.py:4: def take_4"],
            ["The sub-agent says: it pops twice.", "The sub-agent says: nobody else calls it."],
            [
                "The file /home/ann/pool/pool.py has been updated. Here is a part of it:\n"
                + FILE[:200],
                text(CHANGED),
            ],
            ["Exit code 1\nFAILED test_pool.py::test_take"],
            ["The file /home/ann/pool/pool.py has been updated."],
            ["1 passed in 0.02s"],
            [text(TODO), text("Good. Does anything else pop twice?")],
            ["Todos have been modified successfully."],
            [text("Thanks, that is all.")],
        ]
        names = [
            "Glob Read",
            "Read",
            "Grep",
            "Task Task",
            "Edit",
            "Bash",
            "Edit",
            "Bash",
            "",
            "TodoWrite",
            "",
            "",
        ]
        calls = [
            [(name, f"/home/ann/pool/{name}-{turn}.py") for name in own.split()]
            for turn, own in enumerate(names)
        ]
        return [self._user(turn, user) for turn, user in enumerate(users)], calls

    def _user(self, turn: int, said: list[Any]) -> list[Block]:
        """Texts are the results of the tools that were called in the turn before."""
        results = [
            {
                "type": "tool_result",
                "tool_use_id": call_id(turn - 1, n),
                "content": s,
                "is_error": s.startswith("Exit code"),
            }
            for n, s in enumerate(s for s in said if isinstance(s, str))
        ]
        return [*results, *(block for block in said if not isinstance(block, str))]

    def turn(self, user: list[Block], calls: list[tuple[str, str]]) -> Reply:
        """A main request.

        The reply joins the conversation, with the calls that a larger model would have made.
        """
        self.messages.append({"role": "user", "content": user})
        if len(self.messages) == 1:
            self.messages.append({"role": "system", "content": ENVIRONMENT.format(self.folder)})
        reply = self.post(self.main_body())
        turn = len(self.replies)
        said = [
            block for block in reply.content if block["type"] != "text" or block["text"].strip()
        ]
        uses = [
            {"type": "tool_use", "id": call_id(turn, n), "name": name, "input": {"target": target}}
            for n, (name, target) in enumerate(calls)
        ]
        self.messages.append(
            {"role": "assistant", "content": [*said, *uses] or [text("(no content)")]}
        )
        self.replies.append(reply)
        return reply

    def main_body(self, without: int = 0) -> Block:
        """The next main request, or that before the last `without` messages.

        Its last message is another one in each request.
        """
        messages = self.messages[: len(self.messages) - without]
        memory = MEMORY.format(self.folder.replace("/", "-"))
        left = text(f"<total_tokens>{190_000 - 3_217 * len(messages)} tokens left</total_tokens>")
        return self._body(
            [text(IDENTITY) | EPHEMERAL, text(INSTRUCTIONS + memory) | EPHEMERAL],
            [tool(name) for name in NAMES],
            [*messages, {"role": "system", "content": [left]}],
        )

    def sub_agent(self, number: int) -> list[Reply]:
        """Two turns of an agent with another system prompt and fewer tools."""
        system = [
            text("You are an agent for Claude Code. " + IDENTITY) | EPHEMERAL,
            text("Notes:\n- Paths are absolute.\n" * 2),
        ]
        messages: list[Block] = [
            {
                "role": "user",
                "content": [text(f"Look who calls take_{number}. Report in one line.")],
            }
        ]
        replies = []
        for n in range(2):
            replies.append(
                self.post(self._body(system, [tool(name) for name in SUB_NAMES], messages))
            )
            use = {
                "type": "tool_use",
                "id": f"toolu_sub{number}_{n}",
                "name": "Grep",
                "input": {"target": f"take_{number}"},
            }
            result = {
                "type": "tool_result",
                "tool_use_id": use["id"],
                "content": FILE[: 90 + 10 * number],
            }
            messages += [
                {"role": "assistant", "content": [*replies[-1].content, use]},
                {"role": "user", "content": [result]},
            ]
        return replies

    def title(self, said: str) -> Reply:
        """What the window asks a small model for."""
        system = [
            text("Write a title of a few words for the following, as JSON with the field 'title'.")
        ]
        return self.post(
            {
                **self._body(system, [], [{"role": "user", "content": said}]),
                "temperature": 0,
                "max_tokens": 4,
            }
        )

    def count_tools(self) -> int:
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": "foo"}],
            "tools": [tool(name) for name in NAMES],
        }
        return self.count(body)

    # -- the wire ----------------------------------------------------------------------------------

    def _body(self, system: list[Block], tools: list[Block], messages: list[Block]) -> Block:
        begins = hashlib.blake2b(json.dumps(messages[0]).encode(), digest_size=2).hexdigest()[:3]
        return {
            "model": self.model,
            "messages": marked(messages),
            "system": [text(BILLING.format(conversation=begins)), *system],
            "tools": tools,
            "metadata": {
                "user_id": json.dumps(
                    {"device_id": "c7d9", "account_uuid": "", "session_id": "bbc4ff50"}
                )
            },
            "max_tokens": self.reply_tokens,
            "thinking": {"type": "adaptive", "display": "omitted"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "high"},
            "temperature": 0,
            "stream": True,
        }

    def count(self, body: Block) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=120)
        connection.request("POST", "/v1/messages/count_tokens?beta=true", json.dumps(body), HEADERS)
        answer = json.loads(connection.getresponse().read())
        connection.close()
        return int(answer["input_tokens"])

    def post(self, body: Block) -> Reply:
        """One message, streamed where the body says so."""
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=120)
        connection.request("POST", "/v1/messages?beta=true", json.dumps(body), HEADERS)
        response = connection.getresponse()
        raw = response.read().decode()
        connection.close()
        assert response.status == 200, raw
        name = response.headers["request-id"]
        if not body.get("stream"):
            message = json.loads(raw)
            return Reply(
                name,
                message["content"],
                message["usage"]["cache_read_input_tokens"],
                whole(message["usage"]),
            )
        events = [json.loads(line[6:]) for line in raw.split("\n") if line.startswith("data: ")]
        assert (events[0]["type"], events[-1]["type"]) == ("message_start", "message_stop"), raw
        usage = next(event for event in events if event["type"] == "message_delta")["usage"]
        return Reply(name, blocks_of(events), usage["cache_read_input_tokens"], whole(usage))


def call_id(turn: int, number: int) -> str:
    return f"toolu_01{turn:02}{number}"


def whole(usage: dict[str, int]) -> int:
    """All tokens of a prompt."""
    return (
        usage["input_tokens"]
        + usage["cache_creation_input_tokens"]
        + usage["cache_read_input_tokens"]
    )


def marked(messages: list[Block]) -> list[Block]:
    """A mark on the last block of the conversation: it moves along."""
    messages = copy.deepcopy(messages)
    last = next(message for message in reversed(messages) if message["role"] == "user")
    if isinstance(last["content"], list):
        last["content"][-1].update(EPHEMERAL)
    return messages


def blocks_of(events: list[Block]) -> list[Block]:
    """The blocks that a stream's events add up to."""
    blocks: list[Block] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(
                {
                    **event["content_block"],
                    **({"partial": ""} if event["content_block"]["type"] == "tool_use" else {}),
                }
            )
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            name = {
                "text_delta": "text",
                "thinking_delta": "thinking",
                "signature_delta": "signature",
            }.get(delta["type"])
            if name is None:
                blocks[-1]["partial"] += delta["partial_json"]
            else:
                blocks[-1][name] = blocks[-1].get(name, "") + delta[name]
    for block in blocks:
        if "partial" in block:
            block["input"] = json.loads(block.pop("partial") or "{}")
    return blocks
