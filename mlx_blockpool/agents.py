"""The room of `mlx-blockpool store agents`: what each agent has on disk, its name and pin, and its end; words the reports.

Does not know argparse or mlx; cli.py says which options there are and prints.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import StoreError
from .formatting import count, human_bytes, table
from .store import offline
from .store.agent_files import Agents, Found
from .store.fs import safe_name
from .store.manifest import Agent, shown
from .store.offline import File, Listing
from .store.reachability import Share, Sharing
from .storing import SHOWN, Report, agreed, naming, watched


@contextmanager
def _told() -> Iterator[None]:
    """What the disk does not let us do, as a StoreError."""
    try:
        yield
    except OSError as error:
        where = f" at {error.filename}" if error.filename else ""
        reason = error.strerror or str(error)
        raise StoreError(f"Cannot go on{where}: {reason}. Needed a folder to read and write, and room there.") from error


def _look(
    root: Path, agents: Agents, namespaces: Collection[str] | None = None, noted: bool = False
) -> tuple[Found, dict[str, Sharing]]:
    """The agents, and by namespace (None: of all agents) who stands on which records; `noted` as in survey()."""
    names = {agent.namespace for agent in agents.all()} if namespaces is None else set(namespaces)
    files = [file for file in Listing(root).records if file.namespace in names]
    judged = list(watched(offline.seen(root, files, naming) if noted else offline.judge(files, naming), len(files), "headers"))
    # A server may have written more behind what was listed already.
    seen = {file.path for file in files}
    later = [file for file in Listing(root).records if file.namespace in names and file.path not in seen]
    judged += offline.judge(later, naming)
    found = agents.look()
    return found, {
        name: Sharing(
            (one for one in judged if one.file.namespace == name),
            [agent for agent in found.agents if agent.namespace == name],
            naming,
        )
        for name in names
    }


# -- list --------------------------------------------------------------------------------------------------------------


def listed(root: Path, namespaces: Collection[str] | None = None) -> Report:
    """Every agent (of these namespaces) with what is on disk of it; sizes in bytes, times in UTC. Raises StoreError."""
    with _told():
        found, sharing = _look(root, Agents(root), namespaces, noted=True)
        return {
            "folder": str(root),
            "agents": [_figures(a, sharing[a.namespace]) for a in found.agents if a.namespace in sharing],
            "bad": [{"path": str(path), "reason": reason} for path, reason in found.bad],
        }


def _figures(agent: Agent, sharing: Sharing) -> Report:
    own, shared = sharing.files(agent)
    return _fields(agent) | {
        "tokens_on_disk": sharing.tokens_on_disk(agent),
        "own": _sizes(own),
        "shared": _sizes(shared),
    }


def _fields(agent: Agent) -> Report:
    return {
        "name": agent.name,
        "shown": shown(agent.name),
        "model": agent.model_id,
        "namespace": agent.namespace,
        "last_hash": None if agent.last_hash is None else agent.last_hash.hex(),
        "tokens": agent.tokens,
        "created": utc(agent.created),
        "used": utc(agent.used),
        "pinned": agent.pinned,
    }


def utc(moment: int) -> str:
    """Seconds since the epoch as ISO 8601 has them."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(moment))


def _sizes(files: Iterable[File]) -> Report:
    sizes = [file.size for file in files]
    return {"records": len(sizes), "bytes": sum(sizes)}


def describe_listed(report: Report) -> str:
    """A table of the agents, and a line for each file that is none."""
    agents = report["agents"]
    lines = [f"{report['folder']}: {count(len(agents), 'agent')}"]
    if agents:
        rows = [["agent", "model", "tokens on disk", "own", "shared", "last used (UTC)", "pinned"]]
        lines += ["", *table(rows + [_cells(agent) for agent in agents], left=2)]
    lines += [f"bad: {item['reason']}" for item in report["bad"]]
    if report["bad"]:
        lines.append("`mlx-blockpool store check --fix` puts bad ones into quarantine.")
    return "\n".join(lines)


def _cells(agent: Report) -> list[str]:
    sizes = [human_bytes(agent[key]["bytes"]) for key in ("own", "shared")]
    on_disk = f"{agent['tokens_on_disk']:,} of {agent['tokens']:,}"
    used = agent["used"][:16].replace("T", " ")
    return [agent["shown"], shown(agent["model"]), on_disk, *sizes, used, "yes" if agent["pinned"] else ""]


# -- names and pins ----------------------------------------------------------------------------------------------------


def change(root: Path, act: str, name: str, new: str = "") -> Report:
    """pin, unpin, rename or fork. An agent may also be called what its file is called. Raises StoreError."""
    agents = Agents(root)
    acts: dict[str, Callable[[str], Agent]] = {
        "pin": agents.pin,
        "unpin": agents.unpin,
        "rename": lambda old: agents.rename(old, new),
        "fork": lambda old: agents.fork(old, new),
    }
    with _told():
        old = _called(agents, name)
        return {"folder": str(root), "act": act, "of": shown(old), "agent": _fields(acts[act](old))}


def _called(agents: Agents, name: str) -> str:
    if agents.get(name) is not None:
        return name
    return next((agent.name for agent in agents.all() if name in (safe_name(agent.name), shown(agent.name))), name)


def describe_change(report: Report) -> str:
    agent, old = report["agent"], report["of"]
    words = {
        "pin": f"{old} is pinned: its records on disk stay when others are dropped.",
        "unpin": f"{old} is no longer pinned.",
        "rename": f"{old} is called {agent['shown']} now.",
        "fork": f"{agent['shown']} goes on from where {old} is: {count(agent['tokens'], 'token')}.",
    }
    return words[report["act"]]


# -- delete ------------------------------------------------------------------------------------------------------------


def delete(root: Path, name: str, yes: bool = False) -> Report:
    """Remove an agent with the records that only its path stands on, and look again: `clean`. Asks unless `yes`.

    Raises StoreError if there is no such agent, nobody to ask, or an agent that cannot be read: its records are not known.
    """
    agents = Agents(root)
    with _told():
        real = _called(agents, name)
        share = _share(root, agents, real)
        what = f"agent {shown(real)} and {_records(_sizes(share.own))} from {root}"
        if not yes:
            if not agreed(what):
                return {"folder": str(root), "agent": shown(real), "deleted": False, "clean": True}
            # Others may have come to need some of it since the question.
            share = _share(root, agents, real)
        # Ends first: whatever stops it, what is left can be reached, and the agent is still there to be deleted.
        gone = offline.remove(share.own)
        agents.remove(real)
        return {"folder": str(root), "agent": shown(real), "deleted": True, "removed": _sizes(gone)} | proof(root, share)


def share_of(root: Path, name: str) -> Share:
    """What would go with an agent, and what would stay. Raises StoreError as delete() does."""
    with _told():
        return _share(root, Agents(root), name)


def _share(root: Path, agents: Agents, name: str) -> Share:
    namespace = agents.need(name).namespace
    found, sharing = _look(root, agents, {namespace})
    if found.bad:
        raise StoreError(f"{found.bad[0][1]} Needed to know what it stands on. Put it aside with `store check --fix`.")
    agent = next((agent for agent in found.agents if (agent.name, agent.namespace) == (name, namespace)), None)
    if agent is None:
        raise StoreError(f"Found another agent {shown(name)} than a moment ago; needed the same. Try again.")
    return sharing[namespace].share(agent)


def proof(root: Path, share: Share) -> Report:
    """What a new look at the files says: whether those that were to go are gone, and those that stay whole."""
    there = {file.path for file in Listing(root).records}
    stays = [stay.file for stay in share.stays]
    judged = list(watched(offline.judge(stays, naming, with_data=True), len(stays), "checksums"))
    still = [str(file.path) for file in share.own if file.path in there]
    bad = [{"path": str(found.file.path), "reason": found.problem} for found in judged if found.problem is not None]
    return {
        "stays": [
            {"path": str(s.file.path), "bytes": s.file.size, "agents": [shown(name) for name in s.agents], "behind": s.behind}
            for s in share.stays
        ],
        "gone": _sizes(file for file in share.own if file.path not in there),
        "still_there": still,
        "whole": _sizes(found.file for found in judged if found.header is not None),
        "bad": bad,
        "clean": not (still or bad),
    }


def describe_delete(report: Report) -> str:
    """What went, what stays and for whom, and what the second look found."""
    if not report["deleted"]:
        return f"Agent {report['agent']} stays."
    lines = [f"Removed agent {report['agent']} and {_records(report['removed'])} that only it stood on."]
    for_agents = [stay for stay in report["stays"] if stay["agents"]]
    for_others = [stay for stay in report["stays"] if not stay["agents"]]
    names = sorted({name for stay in for_agents for name in stay["agents"]})
    names[SHOWN:] = [f"{len(names) - SHOWN:,} more"] if len(names) > SHOWN else []
    for stays, whom in ((for_agents, f"for {', '.join(names)}"), (for_others, "for conversations that have no name")):
        sizes = {"records": len(stays), "bytes": sum(stay["bytes"] for stay in stays)}
        lines += [f"Kept {_records(sizes)} {whom}."] if stays else []
    lines += [f"still there: {path}" for path in report["still_there"]] + [f"bad: {item['reason']}" for item in report["bad"]]
    gone, whole = report["gone"]["records"], report["whole"]["records"]
    total = gone + len(report["still_there"])
    lines.append(f"Looked again: {gone:,} of {total:,} are gone, {whole:,} of {len(report['stays']):,} whole to the last byte.")
    return "\n".join(lines)


def _records(sizes: Report) -> str:
    return f"{count(sizes['records'], 'record')} ({human_bytes(sizes['bytes'])})"
