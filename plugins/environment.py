"""What a system prompt says of the folder that its client was started in, among instructions that
are the same in every folder.

These are blocks in tags such as `<env>` and paragraphs with a heading such as `# Environment`, if
they state the working directory; lines with the path of a folder that the client has for that
directory; what follows a heading with such a path, or `gitStatus:`; and lines that state today's
date. Code between fences is not searched.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence

from .dates import statements

# A label and an absolute path.
DIRECTORY = re.compile(
    r"(?:\bcwd|\bworking directory|\bworking in the directory|\bworkspace root folder)"
    r"[ \t*_`\"']{0,3}(?:[:=>]|is\b)[ \t*_`\"']{0,3}(/[^\n`\"'<>*]*)",
    re.IGNORECASE,
)
# A block in tags has fewer lines, and a longer text stays as it is.
MOST_LINES, MOST_CHARACTERS = 50, 1 << 17
FENCE = re.compile(r"[ \t]*(`{3,}|~{3,})[^`\n]*$")
TAG = re.compile(
    r"[ \t]*<(env|environment(?:_context|_details|_info)?|system_info(?:rmation)?|workspace_info)>"
    r"\s*$",
    re.IGNORECASE,
)
HEADING = re.compile(r"#{1,6}[ \t]+\S")
ENVIRONMENT = re.compile(r"#{1,6}[ \t].*\b(?:environment|system info|workspace)", re.IGNORECASE)
GIT_STATUS = re.compile(r"(?:gitStatus:|#{1,6}[ \t]+gitStatus\s*$)")
# Clients call a folder for /srv/pool /home/ann/.client/projects/-srv-pool/.
OWN_FOLDER = re.compile(r"/(-[\w-]+)(?=/)", re.ASCII)


def working_directories(text: str) -> Iterator[str]:
    """The working directories that a text states, as clients name their folders for them."""
    for found in DIRECTORY.finditer(text):
        yield re.sub(r"[^A-Za-z0-9]", "-", found[1].rstrip(" \t\r/.,;)"))


def separate(text: str, directories: Collection[str]) -> tuple[str, list[str]]:
    """The text without what it says of the environment, and the paragraphs that say it.

    `directories`: the working_directories() of the chat. A line with the path of a
    client's folder comes with a copy of its section's heading.
    """
    if len(text) > MOST_CHARACTERS:
        return text, []
    lines = text.splitlines(keepends=True)
    left: list[str] = []
    moved: list[str] = []
    heading, start = "", 0
    while start < len(lines):
        line, names_folder = lines[start], _names_folder(lines[start], directories)
        end, paragraph = start + 1, ""
        if line.isspace():
            pass
        elif fence := FENCE.match(line):
            end = _end(lines, start, fence[1], len(lines)) or len(lines)
        elif GIT_STATUS.match(line) or (names_folder and HEADING.match(line)):
            # A file or the output of a command, which may have headings too.
            end = len(lines)
            paragraph = "".join(lines[start:])
        elif block := _block(lines, start):
            end = start + len(block)
            # Such as `The environment is:`.
            is_introduced = TAG.match(line) and left and left[-1].rstrip().endswith(":")
            paragraph = "".join([left.pop(), *block] if is_introduced else block)
        elif HEADING.match(line):
            heading = line
        elif names_folder:
            paragraph, heading = heading + line, ""
        elif list(statements(line)) == [(0, len(line))]:
            paragraph = line
        if paragraph:
            moved.append(paragraph.strip("\r\n"))
        else:
            left += lines[start:end]
        start = end
    return "".join(left), moved


def _names_folder(line: str, directories: Collection[str]) -> bool:
    """Return whether a line has the path of a folder that is named after a working directory, or
    after one above it.
    """
    return any(
        f"{directory}-".startswith(f"{found[1]}-")
        for found in OWN_FOLDER.finditer(line)
        for directory in directories
    )


def _block(lines: Sequence[str], start: int) -> list[str]:
    """The lines of a block of the environment that begins with line `start`; none if it does not
    state the working directory.
    """
    if tag := TAG.match(lines[start]):
        end = _end(lines, start, f"</{tag[1]}>", start + MOST_LINES)
    elif ENVIRONMENT.match(lines[start]):
        end = start + 1
        while end < len(lines) and not lines[end].strip():
            end += 1
        while end < len(lines) and lines[end].strip() and not HEADING.match(lines[end]):
            end += 1
    else:
        return []
    block = list(lines[start:end])
    return block if DIRECTORY.search("".join(block)) else []


def _end(lines: Sequence[str], start: int, closing: str, last: int) -> int:
    """The line after the next one up to `last` that begins with `closing`; 0 without one."""
    for at in range(start + 1, min(last, len(lines))):
        if lines[at].lstrip().startswith(closing):
            return at + 1
    return 0
