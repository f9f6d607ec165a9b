"""Earlier replies that a chat repeats in other tokens: where its path is cut, and that `replay`
would have kept it.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_blockpool.hooks import Replayed
from mlx_blockpool.plugins import make_plugin_manager
from mlx_blockpool.prefix.lookup import Lookup
from mlx_blockpool.server.normalise import Normalisers, scope_of
from mlx_blockpool.server.watch.divergence import Chat
from mlx_blockpool.server.watch.explain import Explained, Explanation
from server.scripted import Say
from server.serving import Client

pytestmark = pytest.mark.server(
    "--pool-bytes 20MB", model="agent", keys="ann:key-of-ann\nbob:key-of-bob\n"
)

PATH = "/v1/chat/completions"
TOOL = {
    "type": "function",
    "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}},
}
CALL = 'I look.\n\n<tool_call>\n{"name":"look_up","arguments":{"word":  "a"}}\n</tool_call>'
THOUGHT = "<think>\nA long thought of what a pool may be.\n</think>\n\nYes."
KEEPS = "--normalise replay would put it back"


def ask(
    server: Client, messages: list[Any], who: str = "ann", normalise: str = "none", **options: Any
) -> tuple[Any, Any]:
    """The answer to a chat, and what its agent is told of it."""
    body = {"messages": messages, "max_tokens": 200, "tools": [TOOL], "user": "one", **options}
    key = {"x-api-key": f"key-of-{who}"}
    status, answer = server.send(PATH, body, headers={"X-Normalise": normalise, **key})
    assert status == 200, answer
    listed = server.send("/v1/cache/explain", headers=key)[1]["requests"][0]
    return answer, server.send(f"/v1/cache/explain/{listed['id']}", headers=key)[1]


def going_on(asked: list[Any], answer: Any, **changes: Any) -> list[Any]:
    """The next turn, by a client that keeps neither thinking nor the spaces around a text."""
    message = answer["choices"][0]["message"]
    calls = message.get("tool_calls")
    reply = {
        "role": "assistant",
        "content": message["content"].strip(),
        **({"tool_calls": calls} if calls else {}),
    }
    behind = (
        {"role": "tool", "content": "It.", "tool_call_id": calls[0]["id"]}
        if calls
        else {"role": "user", "content": "Sure?"}
    )
    return [*asked, {**reply, **changes}, behind]


@pytest.mark.parametrize("text", [CALL, THOUGHT, "Yes, it is.\n\n"])
def test_replay_is_named_where_an_earlier_reply_is_written_in_other_tokens(
    server: Client, say: Say, text: str
) -> None:
    say(text)
    for header, cause in (("none", "differs"), ("none,replay", "longer")):
        asked: list[Any] = [{"role": "user", "content": f"{text[:9]} {header}. Is it?"}]
        first, _ = ask(server, asked, normalise=header)
        _, found = ask(server, going_on(asked, first), normalise=header)
        before = first["usage"]["prompt_tokens"]
        assert found["cause"] == cause
        if cause == "longer":
            assert found["cached_tokens"] >= before + first["usage"]["completion_tokens"] - 1
            assert KEEPS not in found["why"]
        else:
            told = found["difference"]
            assert (told["normaliser"], KEEPS in found["why"]) == ("replay", True)
            assert before <= told["position"] < before + first["usage"]["completion_tokens"]
            assert told["known_line"] is not None


def test_a_template_that_opens_replies_otherwise_than_it_shows_them_is_told_too(
    server: Client, say: Say
) -> None:
    say("Yes.")
    asked: list[Any] = [{"role": "user", "content": "Thinking is closed, is it?"}]
    options: Any = {"chat_template_kwargs": {"enable_thinking": False}}
    first, _ = ask(server, asked, **options)
    _, found = ask(server, going_on(asked, first), **options)
    assert (found["cause"], found["difference"]["normaliser"]) == ("differs", "replay")
    assert found["difference"]["position"] < first["usage"]["prompt_tokens"]


def test_replay_is_not_named_where_something_else_has_changed(server: Client, say: Say) -> None:
    """Each of these conversations is known, but what differs stands before its reply, or the
    reply is another one.
    """
    say("Yes, it is so.")
    asked: list[Any] = [{"role": "user", "content": "What changes?"}]
    first, _ = ask(server, asked)
    changed = [{"role": "user", "content": " What changes?  "}]
    for messages in (going_on(changed, first), going_on(asked, first, content="Yes, it")):
        _, found = ask(server, messages)
        assert (found["cause"], found["difference"]["normaliser"], KEEPS in found["why"]) == (
            "differs",
            None,
            False,
        )
    _, found = ask(server, going_on(asked, first), tools=[TOOL, TOOL])
    assert found["difference"] is None or found["difference"]["normaliser"] is None


def test_a_trimmed_reply_shows_both_texts(server: Client, say: Say) -> None:
    say("Yes, it is. So there is more.")
    asked: list[Any] = [{"role": "user", "content": "Is it trimmed?"}]
    first, _ = ask(server, asked)
    _, found = ask(server, going_on(asked, first, content="Yes, it is."))
    told = found["difference"]
    assert (found["cause"], told["line"]) == ("differs", "Yes, it is.<|im_end|>")
    assert told["known_line"].startswith("Yes, it is. So there is more.")


class Letters:
    """A tokenizer of bytes, whose replies end with 0."""

    has_chat_template = True
    eos_token_ids = (0,)

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode()


def served_with(tokenizer: Any) -> Any:
    """A loaded model that has noted no agents."""
    return SimpleNamespace(
        provider=SimpleNamespace(name="m", tokenizer=tokenizer),
        agents=None,
        last_turn=lambda name: None,
    )


def started(sampled: str, back: str, agent: str | None, ended: bool = False) -> Explained:
    """A turn whose prompt parts from the reply before it where the known tokens end."""
    normalisers, asked = Normalisers(make_plugin_manager()), [{"role": "user", "content": "Q"}]
    reply = {"role": "assistant", "content": sampled.strip()}
    tokens = [*sampled.encode(), *([0] if ended else [])]
    normalisers.replies.remember(asked, reply, tokens, b"s", list(b"Q\n"), None, "ann")
    replies = normalisers.replies.rendered_anew([*asked, reply], b"s", None)
    chat = Chat(asked, normalisers, list(normalisers.by_name), replies=replies)
    explained = Explained(Explanation("req_1", 0.0, "/", "m", None), chat, agent)
    prompt, at = list(f"Q\n{back}|And?".encode()), len("Q\n" + back)
    explained.start(served_with(Letters()), b"", prompt, at, Lookup(len(prompt), at, at, "longer"))
    return explained


def test_what_was_sampled_last_and_not_computed_is_known_to_differ(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    for agent, known in (("ann", "Yes."), ("bob", None), (None, None)):
        explained = started("Yes.\n", "Yes.", agent)
        found = explained.now.difference
        assert explained.now.cause == "differs"
        assert found is not None
        assert (found.position, found.line, found.known_line, found.normaliser) == (
            6,
            "Yes.|And?",
            known,
            "replay",
        )
        assert '"Yes." was known' in caplog.messages[-1], "the log has both"
    assert started("Yes.", "Yes.", "ann", ended=True).now.cause == "longer", (
        "the template ends replies"
    )
    assert started("Yes.", "Yes.", "ann").now.cause == "longer"


# -- whose replies they are ------------------------------------------------------------------------


def test_replies_of_another_key_are_not_put_back(server: Client, say: Say) -> None:
    """The same words asked and answered, and other thoughts: each key's next prompt has its own,
    and a third's has none.
    """
    asked: list[Any] = [{"role": "user", "content": "Whose thoughts are these?"}]
    sizes, answers = {}, {}
    for who, thought in (("ann", "Ann's secret thought of the safe."), ("bob", "Hm.")):
        say(f"<think>\n{thought}\n</think>\n\nYes.")
        answers[who], _ = ask(server, asked, who)
    said = [going_on(asked, answers[who]) for who in answers]
    assert said[0] == said[1]
    say("So.")
    for who in answers:
        sizes[who] = [
            ask(server, said[0], who, name)[0]["usage"]["prompt_tokens"]
            for name in ("none", "replay")
        ]
    (plain, anns), (same, bobs) = sizes["ann"], sizes["bob"]
    assert plain == same
    longer = [answers[who]["usage"]["completion_tokens"] for who in ("ann", "bob")]
    assert anns - bobs == longer[0] - longer[1] > 0
    # Only Ann goes on: Bob's chat of the same words has nothing to put back, and its explanation
    # names nothing.
    say("<think>\nAnother secret.\n</think>\n\nIt is.")
    answer, _ = ask(server, said[0], "ann")
    further = going_on(said[0], answer)
    assert ask(server, further, "ann")[1]["difference"]["normaliser"] == "replay"
    _, found = ask(server, further, "bob")
    assert (found["difference"] or {}).get("normaliser") is None
    assert "secret" not in str(found)


def test_replies_under_another_salt_or_of_another_model_are_not_put_back() -> None:
    normalisers = Normalisers(make_plugin_manager())
    asked, reply = [{"role": "user", "content": "Q"}], {"role": "assistant", "content": "Yes."}
    normalisers.replies.remember(asked, reply, [1, 2], scope_of("ann", b"K1", "m"))
    for scope, is_put_back in (
        (scope_of("ann", b"K1", "m"), True),
        (scope_of("ann", b"K2", "m"), False),
        (scope_of("ann", b"", "m"), False),
        (scope_of("bob", b"K1", "m"), False),
        (scope_of(None, b"K1", "m"), False),
        (scope_of("ann", b"K1", "other"), False),
    ):
        found, changed = normalisers.changes(["replay"], [*asked, reply], scope)
        assert (isinstance(found[1], Replayed), changed) == (
            is_put_back,
            ("replay",) if is_put_back else (),
        )
        assert bool(normalisers.replies.rendered_anew([*asked, reply], scope, None)) == is_put_back
