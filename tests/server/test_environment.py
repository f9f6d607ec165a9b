"""What a client says of its working directory moves after what its sessions share."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_blockpool_plugins.environment import BLOCK_LINES
from mlx_blockpool_plugins.volatile import (
    MOST_CHARACTERS,
    MOST_LINES,
    move_dates,
    move_environment,
)

from mlx_blockpool.hooks import text_of
from mlx_blockpool.server.normalise import RememberedReplies
from server.claude_code import Window
from server.scripted import save_agent
from server.serving import blockpool_server

NO_REPLIES = RememberedReplies()
Chat = list[dict[str, Any]]
CODE = "```sh\n# Environment\nWorking directory: /srv/pool\nls /home/ann/.c/-srv-pool/notes/\n```\n"
MEMORY = "Notes are in `/home/ann/.c/projects/-srv-pool/notes/`: one fact in each.\n"
ENV = "<env>\n  Working directory: /srv/pool\n  Platform: linux\n</env>\n"
ENVIRONMENT = (
    "# Environment\nYou were started in: \n - Primary working directory: /srv/pool\n"
    " - Platform: linux\n"
)
STATUS = "gitStatus: As it was at the start.\n\nCurrent branch: main\n\nStatus:\nM a.py\n"


def moved(system: str, user: str = "Hello", *others: dict[str, Any]) -> tuple[str, str]:
    """What is left of a system prompt, and what the first user message begins with."""
    chat = [{"role": "system", "content": system}, {"role": "user", "content": user}, *others]
    before = json.dumps(chat)
    found = move_environment(chat, NO_REPLIES)
    assert json.dumps(chat) == before, "the client's own messages were changed"
    assert move_environment(found, NO_REPLIES) == found
    assert [m["role"] for m in found] == [m["role"] for m in chat]
    assert found[2:] == list(others)
    assert found[1]["content"].endswith(user)
    return found[0]["content"], found[1]["content"].removesuffix(user)


@pytest.mark.parametrize(
    ("system", "left", "first"),
    [
        (
            f"Be brief.\nThe environment is:\n{ENV}Use tools.\n",
            "Be brief.\nUse tools.\n",
            f"The environment is:\n{ENV}",
        ),
        (f"Be brief.\n\n{ENVIRONMENT}\n# Tools\n", "Be brief.\n\n\n# Tools\n", ENVIRONMENT),
        (
            "## Workspace\n\ncwd: /srv/pool\n\nUse tools.\n",
            "\nUse tools.\n",
            "## Workspace\n\ncwd: /srv/pool\n",
        ),
        (f"Be brief.\n{ENV}{STATUS}", "Be brief.\n", f"{ENV}\n{STATUS}"),
        (
            f"# Memory\n\n{MEMORY}\nIt stays.\n{ENV}",
            "# Memory\n\n\nIt stays.\n",
            f"# Memory\n{MEMORY}\n{ENV}",
        ),
        (
            f"{ENV}Use tools.\n## /home/ann/.c/-srv-pool/NOTES.md\n\nx\n\n# A heading\ny\n",
            "Use tools.\n",
            f"{ENV}\n## /home/ann/.c/-srv-pool/NOTES.md\n\nx\n\n# A heading\ny\n",
        ),
        (
            f"{ENV}Use tools.\nToday's date is 2026-11-28.\nGo on.\n",
            "Use tools.\nGo on.\n",
            f"{ENV}\nToday's date is 2026-11-28.\n",
        ),
        (
            "Use tools.\r\nToday's date is 2026-11-28.\r\nYour cwd is: /srv/pool\r\n",
            "Use tools.\r\nYour cwd is: /srv/pool\r\n",
            "Today's date is 2026-11-28.\n",
        ),
        (
            f"Follow these:\nToday's date is 2026-11-28.\n{ENV}- a rule\n",
            "Follow these:\n- a rule\n",
            f"Today's date is 2026-11-28.\n\n{ENV}",
        ),
        (f"```md\n```sh\n{ENV}```\n{ENV}", f"```md\n```sh\n{ENV}```\n", ENV),
        (f"1. ```\n{ENV}   ```\n{ENV}", f"1. ```\n{ENV}   ```\n", ENV),
        (
            f"{ENV}# A\n- Keep /home/ann/.c/-srv-pool/\n- Or not.\n- /x/-srv-pool/y\n",
            "# A\n- Or not.\n",
            f"# A\n- Keep /home/ann/.c/-srv-pool/\n\n- /x/-srv-pool/y\n\n{ENV}",
        ),
    ],
    ids=[
        *("tag", "heading", "blank line", "status", "folder", "file", "date", "carriage return"),
        *("not introduced", "code in code", "code in an item", "items"),
    ],
)
def test_the_environment_moves_to_the_first_user_message(
    system: str, left: str, first: str
) -> None:
    assert moved(system) == (left, f"{first}\n")


def test_a_line_about_the_folder_moves_if_the_user_message_states_the_directory() -> None:
    """As qwen-code's does, and one above the directory counts too."""
    said = "I'm currently working in the directory: /srv/pool/src\nx"
    assert moved(f"# Notes\n{MEMORY}\nBe brief.", said) == (
        "# Notes\n\nBe brief.",
        f"# Notes\n{MEMORY}\n",
    )


@pytest.mark.parametrize(
    ("system", "user"),
    [
        (f"Be brief.\n{MEMORY}Today's date is 2026-11-28.\n{STATUS}", "Hello"),
        ("Never leave the working directory: /srv/pool\n", "Hello"),
        ("Be brief.\n", f"Look:\n{ENV}{STATUS}{MEMORY}"),
        (CODE, "Hello"),
        (f"{CODE}~~~~\n```\n{ENV}~~~~\n", "Hello"),
        (f"```\n{ENV}", "Hello"),
        ("<env>\nPlatform: linux\n</env>\n# Environment\nIs shared.\n", "cwd: /srv/pool"),
        ("<env>\nWorking directory: /srv/pool\n", "Hello"),
        ("ls /home/ann/.c/-srv-pools/x and /srv/pool/x\n", "cwd: /srv/pool"),
        (ENV + "x" * MOST_CHARACTERS, "Hello"),
        (ENV + "\n" * MOST_LINES, "Hello"),
        ("# Environment\ncwd: /srv/pool\n" + "x\n" * BLOCK_LINES, "Hello"),
        ("# \xa0environment\n" * 9 + "cwd: /srv/pool\n", "Hello"),
        (f"Look:\n\n    {ENV}", "Hello"),
        ("# Environment\ncwd: /srv/pool\n```\nls\n\na.py\n```\n", "Hello"),
        ("<env>\ncwd: /srv/pool\n</env> Be brief.\n", "Hello"),
        (f"|a|\n|-|\n|{MEMORY.rstrip()}|\n|b|\n", "cwd: /srv/pool"),
        (f"{MEMORY}and never\nanywhere else.\n", "cwd: /srv/pool"),
        (f"- If it is useful:\n  {MEMORY}", "cwd: /srv/pool"),
        ("# Environment variables\nSet cwd: /tmp before a call.\n", "Hello"),
        (f"Today's date is 2026-11-28.\n{STATUS}", "cwd: /srv/pool"),
        (f"In /x/{'-a' * 2100}/\n", f"cwd: {'/a' * 2100}"),
        ("# Environment\nToday's date is 2026-11-28.\n\n- cwd: /srv/pool\n", "Hello"),
        (f"# Environment\n- {MEMORY}\ncwd: /srv/pool\n", "Hello"),
        (f"Be brief.\u2028{ENV}", "Hello"),
    ],
    ids=[
        *("no directory", "an instruction", "a user's text", "code", "fences", "an open fence"),
        *("no directory in it", "an open tag", "another folder", "a long text", "many lines"),
        *("a long block", "no heading", "indented", "a fence in it", "a tag and more", "a table"),
        *("a sentence", "an item's end", "not the label", "the user's directory", "a long path"),
        *("the heading's line", "the heading's item", "another end of a line"),
    ],
)
def test_everything_else_stays(system: str, user: str) -> None:
    assert moved(system, user) == (system, "")


def test_a_system_message_after_the_first_user_message_moves_before_it() -> None:
    """As Claude Code's does; what follows the reply and counters stay."""
    said, count = {"role": "user", "content": [{"type": "text", "text": "Hello"}]}, "9 tokens left"
    chat: Chat = [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        said,
        {"role": "system", "content": f"{ENVIRONMENT}\nSkills are:\n- init\n"},
        {"role": "system", "content": count},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "And?"},
        {"role": "system", "content": ENVIRONMENT},
    ]
    found = move_environment(chat, NO_REPLIES)
    environment = {"type": "text", "text": f"{ENVIRONMENT}\n"}
    assert found == [
        chat[0],
        {"role": "system", "content": "\nSkills are:\n- init\n"},
        {"role": "user", "content": [environment, {"type": "text", "text": "Hello"}]},
        *chat[3:],
    ]
    assert move_environment(found, NO_REPLIES) == found
    for end in (4, 5, 6):
        assert move_environment(chat[:end], NO_REPLIES) == found[:end], "each turn the same"
    assert move_environment([chat[0], *chat[2:4]], NO_REPLIES) == [chat[0], *chat[2:4]]


def test_a_chat_has_one_bound() -> None:
    """Many texts take no longer than one."""
    for filling, count in (("x" * (MOST_CHARACTERS // 8), 9), ("\n" * (MOST_LINES // 8), 9)):
        text = {"type": "text", "text": ENV + filling}
        for system in (
            [{"role": "system", "content": [text] * count}],
            [{"role": "system", "content": [text]}] * count,
        ):
            user = {"role": "user", "content": "Hello"}
            chat: Chat = [*system, user]
            assert move_environment(chat, NO_REPLIES) == chat
            assert move_environment([user, *system], NO_REPLIES) == [user, *system]
            few: Chat = [{"role": "system", "content": [text] * 7}, user]
            assert move_environment(few, NO_REPLIES) != few


def test_what_a_later_message_states_moves_no_date_of_an_earlier_one() -> None:
    """It may come after another user message in the next turn."""
    dated = {"role": "system", "content": f"Be brief.\nToday's date is 2026-11-28.\n{STATUS}"}
    user, later = {"role": "user", "content": "Hello"}, {"role": "system", "content": f"{ENV}x\n"}
    assert move_environment([dated, user, later], NO_REPLIES) == [
        dated,
        {"role": "system", "content": "x\n"},
        {"role": "user", "content": f"{ENV}\nHello"},
    ]


def test_a_later_message_of_which_nothing_moves_stays() -> None:
    chat: Chat = [
        {"role": "system", "content": ENV},
        {"role": "user", "content": "Hello"},
        {"role": "system", "content": "The cwd: /b is used from now on."},
    ]
    found = move_environment(chat, NO_REPLIES)
    assert found == [
        {"role": "system", "content": ""},
        {"role": "user", "content": f"{ENV}\nHello"},
        chat[2],
    ]


@pytest.mark.parametrize("content", [5, {"type": "text", "text": "Hello"}])
def test_a_user_message_that_is_not_text_is_left_to_the_server(content: Any) -> None:
    system = {"role": "system", "content": f"{ENV}Today's date is 2026-11-28.\n"}
    chat: Chat = [system, {"role": "user", "content": content}]
    assert move_environment(chat, NO_REPLIES) == move_dates(chat, NO_REPLIES) == chat


LINES = st.lists(
    st.sampled_from([*ENV.splitlines(), *ENVIRONMENT.splitlines(), *CODE.splitlines(), "", "x:"])
    | st.sampled_from([*MEMORY.splitlines(), *STATUS.splitlines(), "# A", "Date: 2026-11-28"]),
    max_size=30,
).map("\n".join)
CHAT = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant"]), "content": LINES}
    )
)


@given(CHAT)
def test_any_chat_has_the_same_lines_elsewhere(chat: Chat) -> None:
    found = move_environment(chat, NO_REPLIES)
    before, after = (
        Counter(line for m in messages for line in text_of(m).splitlines() if line)
        for messages in (chat, found)
    )
    assert not before - after
    # A line may come with a copy of its heading.
    assert all(line.startswith("#") for line in after - before)
    assert move_environment(found, NO_REPLIES) == found
    others = ("user", "assistant")
    assert [m["role"] for m in found if m["role"] in others] == [
        m["role"] for m in chat if m["role"] in others
    ]


def test_a_second_session_in_another_folder_reads_what_is_before_its_environment(
    tmp_path: Path,
) -> None:
    model = save_agent(tmp_path / "llama")
    read = {}
    for options in ((), ("--normalise", "none,vendor-header")):
        with blockpool_server(
            model, "--pool-bytes", "60MB", "--max-positions", "20000", *options
        ) as server:
            for folder in ("/home/ann/pool", "/home/ann/another"):
                window = Window(server, str(model), folder=folder, reply_tokens=4)
                window.run(turns=1)
            read[options] = window.replies[0].read / window.replies[0].prompt
            server.settle()
    assert read[()] > 0.8 > 0.7 > read[("--normalise", "none,vendor-header")]
