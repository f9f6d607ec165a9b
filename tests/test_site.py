"""The site that mkdocs makes of the documents. .ci/run builds it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml
from documents import JOURNALS, ROOT, TEXTS, commands


def pages(nav: list[Any]) -> Iterator[str]:
    for item in nav:
        if isinstance(item, str):
            yield item
        else:
            (found,) = item.values()
            yield from pages([found] if isinstance(found, str) else found)


def test_every_document_is_a_page_of_the_site_once() -> None:
    settings = yaml.safe_load((ROOT / ".ci/mkdocs.yml").read_text(encoding="utf-8"))
    journals = [path.relative_to(ROOT).as_posix() for path in JOURNALS]
    assert sorted(pages(settings["nav"])) == sorted([*TEXTS, *journals])


def test_the_workflow_for_a_mac_runs_the_commands_of_the_readme() -> None:
    workflow = yaml.safe_load((ROOT / ".ci/macos.yml").read_text(encoding="utf-8"))
    run = [step["run"] for step in workflow["jobs"]["test"]["steps"] if "run" in step]
    readme = [command.replace("[cpu,test]", "[test]") for command in commands("README.md")]
    assert run[:3] == [readme[0], readme[1], ".venv/bin/pytest"]
    assert run[2] in readme
