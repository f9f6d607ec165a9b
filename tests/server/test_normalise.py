"""Normalisers: what each does, who asks for them, and what a changing prompt reuses with and
without them.
"""

from __future__ import annotations

import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_blockpool_plugins.dates import statements
from mlx_blockpool_plugins.volatile import drop_bookkeeping, drop_vendor_header, move_dates, replay

from mlx_blockpool.config import HistoryConfig
from mlx_blockpool.hooks import Replayed
from mlx_blockpool.plugins import make_plugin_manager
from mlx_blockpool.server.normalise import Normalisers, RememberedReplies
from server.scripted import Say, save_agent
from server.serving import Client, blockpool_server, cached_tokens, text_of

NO_REPLIES = RememberedReplies()
SYSTEM = (
    "You are an agent.\nx-anthropic-billing-header: cc_version=2.1.330;\nsession id: "
    "{nonce}\nToday's date is {date}.\n" + "Be brief. " * 60
)


def system(nonce: str, date: str = "2026-11-21") -> dict[str, Any]:
    return {"role": "system", "content": SYSTEM.format(nonce=nonce, date=date)}


def test_bookkeeping_lines_are_left_out_of_the_system_prompt_alone() -> None:
    user = {"role": "user", "content": "nonce: 12 is what I say"}
    found = drop_bookkeeping([system("a1"), user], NO_REPLIES)
    assert found == drop_bookkeeping([system("b2"), user], NO_REPLIES)
    assert found[0]["content"].startswith("You are an agent.\nToday's date")
    assert found[1] == user


def test_parts_of_a_system_prompt_are_changed_each_by_itself() -> None:
    parts = [{"type": "text", "text": "nonce: 1"}, {"type": "text", "text": "Stay."}]
    assert drop_bookkeeping([{"role": "system", "content": parts}], NO_REPLIES)[0]["content"] == [
        {"type": "text", "text": ""},
        {"type": "text", "text": "Stay."},
    ]


def test_the_header_for_a_vendor_is_left_out_of_the_system_prompt_alone() -> None:
    header = "x-anthropic-billing-header: cc_version=2.1.330.ca2; cc_entrypoint=sdk-cli;"
    asked = [
        {
            "role": "system",
            "content": [
                {"type": "text", "text": header},
                {"type": "text", "text": f"Stay.\n{header}\nnonce: 1"},
            ],
        },
        {"role": "user", "content": header},
    ]
    found = drop_vendor_header(asked, NO_REPLIES)
    assert found[0]["content"] == [
        {"type": "text", "text": ""},
        {"type": "text", "text": "Stay.\nnonce: 1"},
    ]
    assert found[1] == asked[1]


def test_what_is_on_and_how_it_is_turned_off() -> None:
    def on(*chosen: str) -> tuple[str, ...]:
        return Normalisers(make_plugin_manager(), chosen).default

    default = ("vendor-header", "environment")
    assert on() == default
    assert on("date", "replay") == (*default, "date", "replay")
    assert (on("none"), on("none", "date"), on("vendor-header")) == ((), ("date",), default)
    plain = Normalisers(make_plugin_manager(), ["date"])
    assert [plain.chosen(header) for header in (None, "", "none", "replay", " none , replay ")] == [
        (*default, "date"),
        default,
        (),
        (*default, "replay"),
        ("replay",),
    ]
    assert [told.partition(":")[0] for told in plain.descriptions()] == [
        *default,
        "date",
    ]


def test_what_is_on_is_said_at_the_start_in_the_log_and_in_the_explanation(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"), blockpool_server(model, "--pool-bytes", "20MB") as ours:
        assert (
            "normalised by vendor-header: Lines of the system prompt that begin with x-anthropic"
            in caplog.text
        )
        for content, names in (
            (SYSTEM.format(nonce="a", date="b"), ["vendor-header"]),
            ("Plain.", []),
        ):
            caplog.clear()
            body = {
                "messages": [
                    {"role": "system", "content": content},
                    {"role": "user", "content": "x"},
                ],
                "max_tokens": 1,
            }
            status, _ = ours.send("/v1/chat/completions", body)
            found = next(reversed(ours.generator.explanations._found.values())).now
            assert (status, found.as_dict()["normalised"]) == (200, names)
            assert ("; normalised by vendor-header" in caplog.text) == bool(names)
            assert ("X-Cache-Normalised" in found.headers(True)) == bool(names)


def test_dates_move_to_the_first_user_message() -> None:
    asked = [
        system("a"),
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "Two"},
    ]
    found = move_dates(asked, NO_REPLIES)
    assert "date" not in found[0]["content"]
    assert found[1]["content"] == "Today's date is 2026-11-21.\n\nOne"
    assert found[2:] == asked[2:]
    assert move_dates(asked[:1], NO_REPLIES) == asked[:1], "nobody to give it to"


@pytest.mark.parametrize(
    "statement",
    [
        "Today is Monday, 24 November 2026.",
        "Today is Monday, November 24, 2026.",
        "Today is November 24th, 2026",
        "Today is the 24th of November 2026.",
        "Today is 24 November 2026 (Monday).",
        "Today is Monday.",
        "Today is Mon, 24 Nov 2026 14:03:05 +0100.",
        "Today is 2026-11-24.",
        "Today is Monday, 2026-11-24.",
        "Today is 24.11.2026, Monday",
        "Today: Nov. 24, 2026",
        "Today's date: Mon Nov 24 2026",
        "Today\u2019s date is Monday, November 24, 2026 (formatted according to the user's "
        "locale).",
        "Current date: 2026-11-24T14:03:05Z",
        "Current time: 14:03",
        "Current time: 2:03 p.m. CET",
        "The current date and time is Monday, November 24, 2026 at 2:03 PM UTC+1.",
        "Current date/time: 2026-11-24 14:03:05.123 Europe/Berlin",
        "The current time is 14:03 local time.",
        "It is currently Monday, 24 November 2026, 14:03.",
        "It's Monday, 24 November 2026.",
        "- **Current date:** 2026-11-24",
        "* Today's date: 2026-11-24",
        "Date: 5 May",
        "date = 24-Nov-2026",
        "Date: Mon Nov 24 14:03:05 CET 2026",
        "The date is November 24, 2026.",
        "Current date: November 2026",
        "Current time: 1795500000",
        "Today is Tues., Sept. 1, 2026.",
        "Current date: 2026年11月24日",
        "  Today's date: Mon Nov 24 2026 14:03:05 GMT+0100 (Central European Standard Time)",
        "The date today is 24 Nov 2026.",
        "TODAY IS MONDAY, 24 NOVEMBER 2026!",
    ],
)
def test_a_statement_of_the_date_is_moved(statement: str) -> None:
    messages = [
        {"role": "system", "content": f"You are an agent.\n{statement}\nBe brief."},
        {"role": "user", "content": "One"},
    ]
    system, user = move_dates(messages, NO_REPLIES)
    assert system["content"] == "You are an agent.\nBe brief."
    assert user["content"] == f"{statement.strip()}\n\nOne"


@pytest.mark.parametrize(
    "line",
    [
        "Today is the deadline: 24 November 2026.",
        "Today is a good day to refactor 24 files.",
        "Today is Monday's child.",
        "Current time complexity is O(n^2).",
        "Date columns have 3 values.",
        "date format: YYYY-MM-DD",
        "Current date format is 2026-11-24 style",
        "Today is 24.",
        "Date: 14:03",
        "Date: Monday",
        "Dates: 2026-11-24",
        "Today is May.",
        "The release date is 24 November 2026.",
        "Today is 24 November 2026 and we ship version 3.",
        "It is 12:30.",
        "It is 5.",
        "Time: 10:30",
        '"Today is Monday, 24 November 2026."',
        "Write `Today is Monday, 24 November 2026.` first.",
        "Current date: unknown",
        "Today's date is what the user says: 2026-11-24 or later.",
        "update 2026-11-24",
        "Current day 3 of 5",
        "Yesterday was Sunday, 23 November 2026.",
        "Today's dates: 24 November",
        "Date-range: 2026-11-24",
        "You are an agent. Date: 2026-11-24. Be brief.",
    ],
)
def test_a_line_that_says_anything_else_is_left_alone(line: str) -> None:
    messages = [
        {"role": "system", "content": f"You are an agent.\n{line}\nBe brief."},
        {"role": "user", "content": "One"},
    ]
    assert move_dates(messages, NO_REPLIES) == messages


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (
            "You are an agent. Today is Monday, 24 November 2026. Be brief.",
            "You are an agent. Be brief.",
        ),
        ("Today is Monday, 24 November 2026. Be brief.\n", "Be brief.\n"),
        (
            "You are an agent. Today is Monday, 24 November 2026.\nBe brief.",
            "You are an agent. \nBe brief.",
        ),
        ("Today is fun. Today is Monday, 24 November 2026.", "Today is fun. "),
    ],
)
def test_a_sentence_is_moved_without_those_around_it(text: str, left: str) -> None:
    system, user = move_dates(
        [{"role": "system", "content": text}, {"role": "user", "content": "One"}], NO_REPLIES
    )
    assert (system["content"], user["content"]) == (
        left,
        "Today is Monday, 24 November 2026.\n\nOne",
    )


def test_replies_come_back_as_they_were_sampled_in_their_own_conversation() -> None:
    replies = RememberedReplies()
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "look", "arguments": '{"a": 1, "b": 2}'},
    }
    asked = {"role": "user", "content": [{"type": "text", "text": "Is it?"}]}
    replies.remember(
        [asked], {"role": "assistant", "content": "Yes.", "tool_calls": [call]}, [5, 6, 7]
    )
    again = {
        "role": "assistant",
        "content": " Yes.\n",
        "tool_calls": [json.loads(json.dumps(call).replace('\\"a\\": 1', '\\"a\\":1'))],
    }
    found = replay([{"role": "user", "content": "Is it?"}, again], replies)
    assert (found[1], list(found[1].tokens)) == (again, [5, 6, 7])  # type: ignore[attr-defined]
    for others in (
        [{"role": "user", "content": "Is that?"}, again],
        [again],
        [asked, {"role": "assistant", "content": "Yes."}],
    ):
        assert not any(isinstance(message, Replayed) for message in replay(others, replies))


def test_the_oldest_replies_are_forgotten() -> None:
    replies = RememberedReplies()
    for n in range(HistoryConfig.replies + 5):
        replies.remember([], {"role": "assistant", "content": str(n)}, [n])
    assert replies.sampled([{"role": "assistant", "content": "4"}]) == {}
    assert list(replies.sampled([{"role": "assistant", "content": "5"}])[0]) == [5]


def test_a_reply_is_put_back_with_the_thinking_that_its_client_has_dropped(
    tmp_path: Path, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next prompt begins with this one and all that was sampled; without it the client's
    text parts from it at once.
    """
    remember = RememberedReplies.remember

    def late(*args: Any, **named: Any) -> None:
        """Clients send the next turn as soon as they have read the reply, so it is remembered
        before.
        """
        time.sleep(0.2)
        remember(*args, **named)

    monkeypatch.setattr(RememberedReplies, "remember", late)
    with blockpool_server(save_agent(tmp_path), "--pool-bytes", "20MB") as ours:
        say("<think>\nA long thought of what a pool may be.\n</think>\n\nYes.")
        for header, is_put_back in (("none", False), ("none,replay", True)):
            said: list[Any] = [{"role": "user", "content": f"Is it? {header}"}]
            first = ours.chat(said, max_tokens=100)
            said += [
                {"role": "assistant", "content": text_of(first)},
                {"role": "user", "content": "Sure?"},
            ]
            status, second = ours.send(
                "/v1/chat/completions",
                {"messages": said, "max_tokens": 1},
                headers={"X-Normalise": header},
            )
            known = cached_tokens(second["usage"])
            before = first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"] - 1
            assert (status, known >= before) == (200, is_put_back)


CONTENT = (
    st.none()
    | st.text(max_size=30)
    | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": st.text(max_size=20)}))
)
CHAT = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": CONTENT}
    )
)


@given(CHAT)
def test_any_chat_keeps_its_messages_and_their_roles(chat: list[dict[str, Any]]) -> None:
    before = json.dumps(chat)
    for apply in (drop_vendor_header, drop_bookkeeping, move_dates, replay):
        assert [m["role"] for m in apply(chat, NO_REPLIES)] == [m["role"] for m in chat]
    assert json.dumps(chat) == before, "the client's own messages were changed"


def test_unknown_names_say_which_there_are() -> None:
    with pytest.raises(
        ValueError,
        match=r"Unknown normaliser dates\. Choose among bookkeeping, date, environment, replay, "
        r"vendor-header, or",
    ):
        Normalisers(make_plugin_manager(), ["dates"])


def turns(client: Client, count: int = 3) -> list[tuple[int, int]]:
    """(prompt tokens, cached tokens) of the turns of an agent whose system prompt changes each
    time.
    """
    said: list[dict[str, Any]] = []
    figures = []
    for n in range(count):
        said.append({"role": "user", "content": f"Question {n}?"})
        answer = client.chat([system(f"n{n}"), *said], max_tokens=6)
        said.append(
            {"role": "assistant", "content": answer["choices"][0]["message"].get("content") or ""}
        )
        usage = answer["usage"]
        figures.append((usage["prompt_tokens"], cached_tokens(usage)))
    return figures


def test_a_changing_line_costs_the_prompt_unless_it_is_normalised(model: Path) -> None:
    with blockpool_server(model, "--pool-bytes", "20MB") as plain:
        assert all(cached < 120 for _, cached in turns(plain))
    with blockpool_server(model, "--pool-bytes", "20MB", "--normalise", "bookkeeping") as ours:
        figures = turns(ours)
        assert all(cached >= before for (before, _), (_, cached) in pairwise(figures))


def test_a_name_that_is_not_known_is_the_clients_error(model: Path) -> None:
    with blockpool_server(model, "--pool-bytes", "20MB") as ours:
        status, answer = ours.send(
            "/v1/chat/completions", {"messages": [system("a")]}, headers={"X-Normalise": "dates"}
        )
    assert status == 400
    assert (
        "Choose among bookkeeping, date, environment, replay, vendor-header"
        in answer["error"]["message"]
    )


@pytest.mark.parametrize("blanks", [" ", "\t", ": "])
def test_a_line_that_is_nearly_a_date_is_looked_at_once(blanks: str) -> None:
    """In a time that grows with its square this would take days."""
    text = "date" + blanks * 1_000_000 + "x"
    assert list(statements(text)) == []
    if blanks != ": ":
        dated = f"date{blanks * 1_000_000}2026-11-24\n"
        assert list(statements(f"{dated}rest")) == [(0, len(dated))]


def test_a_statement_in_a_remark_of_another_moves_with_it() -> None:
    text = "Today is Monday (a. Today is Tuesday. b). Be brief."
    assert list(statements(text)) == [(0, len(text) - len("Be brief."))]


@pytest.mark.parametrize(
    "part",
    ["date: 1\n", "Today is Monday, 24 ", "Today is Monday, 24 November ", "date (", "* * date "],
)
def test_a_text_of_nearly_nothing_but_dates_is_left(part: str) -> None:
    assert list(statements(part * 100_000)) == []


def test_a_long_text_is_looked_through_in_pieces() -> None:
    lines = [
        f"{'nonce' if i % 7 == 0 else 'date' if i % 50 == 1 else 'line'}: 2026-11-{i % 28 + 1}\n"
        for i in range(20_000)
    ]
    message = {"role": "system", "content": "".join(lines)}
    assert drop_bookkeeping([message], RememberedReplies()) == [
        {**message, "content": "".join(s for s in lines if s[0] != "n")}
    ]
    moved = move_dates([message, {"role": "user", "content": "x"}], RememberedReplies())
    assert moved[0]["content"] == "".join(s for s in lines if s[0] != "d")
    assert moved[1]["content"] == "".join(s for s in lines if s[0] == "d") + "\nx"
