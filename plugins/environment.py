"""What a system prompt says of the folder that its client was started in, among instructions that
are the same in every folder.

These are blocks in tags such as `<env>` and paragraphs with a heading such as `# Environment`, if
they state the working directory; lines with the path of a folder that the client has for that
directory; what follows a heading with such a path; and, in a message that states the directory,
what follows `gitStatus:`, and lines that state today's date. Code between fences is not searched.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence, Set
from io import StringIO

from .dates import statements

# A label and an absolute path, of which 4,096 characters count.
DIRECTORY = re.compile(
    r"(?:\bcwd|\bworking directory|\bworking in the directory|\bworkspace root folder)"
    r"[ \t*_`\"']{0,3}(?:[:=>]|is\b:?)[ \t*_`\"']{0,3}(/[^\n`\"'<>*]{0,4095})",
    re.IGNORECASE,
)
# As the first words of a line.
STATED = re.compile(
    r"[ \t]*+(?:[-*+][ \t]++)?+[*_`]{0,3}(?:(?:primary|current) )?" + DIRECTORY.pattern,
    re.IGNORECASE,
)
# A block has at most this many.
BLOCK_LINES = 50
ITEM = r"[ \t]*+(?:[-*+]|\d{1,9}[.)])[ \t]"
FENCE = re.compile(rf"(?:{ITEM})?+[ \t]*+(`{{3,}}|~{{3,}})[^`\n]*$")
# With more blanks before it, it is code.
TAG = re.compile(
    r" {0,3}<(env|environment(?:_context|_details|_info)?|system_info(?:rmation)?|workspace_info)>"
    r"\s*$",
    re.IGNORECASE,
)
HEADING = re.compile(r"#{1,6}[ \t]++\S")
ENVIRONMENT = re.compile(
    rf"(?={HEADING.pattern}).*\b(?:environment|system info|workspace)", re.IGNORECASE
)
GIT_STATUS = re.compile(r"(?:gitStatus:|#{1,6}[ \t]+gitStatus\s*$)")
PARAGRAPH_END = re.compile(rf"\s*$|{HEADING.pattern}|{GIT_STATUS.pattern}")
# What does not continue the sentence of the line before.
BEGINNING = re.compile(rf"\s*$|{ITEM}|{HEADING.pattern}|{FENCE.pattern}")
# Clients call a folder for /srv/pool /home/ann/.client/projects/-srv-pool/.
OWN_FOLDER = re.compile(r"/(-[\w-]+)(?=/)", re.ASCII)


def working_directories(text: str) -> Iterator[str]:
    """The working directories that a text states, as clients name their folders for them, with a
    hyphen at the end.
    """
    for found in DIRECTORY.finditer(text):
        yield re.sub(r"[^A-Za-z0-9]", "-", found[1].rstrip(" \t\r/.,;)")) + "-"


def separate(
    text: str, directories: Collection[str], states_directory: bool
) -> tuple[str, list[str]]:
    """The text without what it says of the environment, and the paragraphs that say it: first the
    lines with the path of a client's folder, with a copy of their section's heading.

    `directories`: the working_directories() of the chat. `states_directory`: the message has one,
    so that its date and git status count.
    """
    lines = StringIO(text).readlines()
    stated = {at for at, line in enumerate(lines) if DIRECTORY.search(line)}
    # The lines that stay with their places, and the headings above those that name a folder.
    left: list[tuple[int, str, str | None]] = [(-1, "", None)]
    blocks: list[str] = []
    heading, end = "", 0
    while end < len(lines):
        start, line, names_folder = end, lines[end], _names_folder(lines[end], directories)
        last, before, _ = left[-1]
        if fence := FENCE.match(line):
            end = _fence_end(lines, start, fence[1])
            left += ((at, lines[at], None) for at in range(start, end))
            continue
        if (names_folder and HEADING.match(line)) or (states_directory and GIT_STATUS.match(line)):
            # A file or the output of a command, which may have headings too.
            end = len(lines)
        elif (end := _block_end(lines, start, stated)) > start:
            # Such as `The environment is:`.
            if TAG.match(line) and last == start - 1 and before.rstrip().endswith(":"):
                start = left.pop()[0]
        elif states_directory and not ENVIRONMENT.match(before) and _is_date(line):
            end += 1
        else:
            heading, end = line if HEADING.match(line) else heading, start + 1
            left.append((start, line, heading if names_folder else None))
            continue
        blocks.append("".join(lines[start:end]).strip("\r\n"))
    folders: list[str] = []
    rest: list[str] = []
    shown = ""
    around = zip(left, left[1:], [*left[2:], left[0]], strict=False)
    for (_, before, _), (_, line, above), (_, after, _) in around:
        if above is not None and _is_alone(before, line, after):
            folders.append(((above if above != shown else "") + line).strip("\r\n"))
            shown = above
        else:
            rest.append(line)
    return "".join(rest), folders + blocks


def _names_folder(line: str, directories: Collection[str]) -> bool:
    """Return whether a line has the path of a folder that is named after a working directory, or
    after one above it.
    """
    return "/-" in line and any(
        directory.startswith(f"{found[1]}-")
        for found in OWN_FOLDER.finditer(line)
        for directory in directories
    )


def _is_alone(before: str, line: str, after: str) -> bool:
    """Return whether a line is a paragraph or an item of a list by itself. The one that follows
    `# Environment` stays, so that another does not follow it instead.
    """
    begins = re.match(ITEM, line) or not before.strip() or HEADING.match(before)
    return bool(begins and BEGINNING.match(after) and not ENVIRONMENT.match(before))


def _is_date(line: str) -> bool:
    line = line.rstrip()
    return bool(re.search(r"\d", line)) and list(statements(line)) == [(0, len(line))]


def _block_end(lines: Sequence[str], start: int, stated: Set[int]) -> int:
    """The line after a block of the environment that begins with line `start`; `start` if there is
    none. `stated`: the lines that state a directory.
    """
    end, last = start + 1, min(start + BLOCK_LINES, len(lines))
    if tag := TAG.match(lines[start]):
        closing = f"</{tag[1]}>"
        end = next((at + 1 for at in range(end, last) if lines[at].strip() == closing), start)
        is_block = not stated.isdisjoint(range(start, end))
    elif ENVIRONMENT.match(lines[start]):
        while end < last and not lines[end].strip():
            end += 1
        while end < last and not PARAGRAPH_END.match(lines[end]):
            end += 1
        is_block = end - start < BLOCK_LINES and any(map(STATED.match, lines[start:end]))
    else:
        return start
    return end if is_block and not any(map(FENCE.match, lines[start:end])) else start


def _fence_end(lines: Sequence[str], start: int, fence: str) -> int:
    """The line after the code whose fence is line `start`."""
    for at in range(start + 1, len(lines)):
        line = lines[at].strip()
        if line.startswith(fence) and not line.strip(fence[0]):
            return at + 1
    return len(lines)
