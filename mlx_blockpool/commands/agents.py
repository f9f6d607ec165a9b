"""`mlx-blockpool store agents` and `store agent`: what each agent has on disk, its name and pin,
and its deletion.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ..formatting import Report, count, human_bytes, table
from ..store.agents import shown
from ..tier.agent_records import AgentRecords, fields, sizes
from .store import SHOWN, Actions, add_action, confirm, folder_at, records_text

# -- options ---------------------------------------------------------------------------------------


def add_options(actions: Actions) -> None:
    """Add `agents` and `agent` to the actions of `store`."""
    add_action(
        actions,
        "agents",
        "what is stored for each agent",
        lambda args: AgentRecords(folder_at(args.store_dir)).listing(),
        describe_listing,
    )
    agent = actions.add_parser("agent", help="pin, fork or delete one agent")
    changes = agent.add_subparsers(dest="change", required=True, metavar="CHANGE")
    for name, text in (
        ("pin", "keep its records when others are removed"),
        ("unpin", "allow its records to be removed like others"),
        ("fork", "add an agent that continues from the same point"),
        (
            "delete",
            "remove it and the records that only it uses; status 1 if some are still there or "
            "others are bad",
        ),
    ):
        if name == "delete":
            action = add_action(
                changes,
                name,
                text,
                lambda args: delete(folder_at(args.store_dir), args.name, args.yes),
                describe_delete,
            )
            action.add_argument("--yes", action="store_true", help="do not ask for confirmation")
        else:
            action = add_action(changes, name, text, _change, describe_change)
        action.add_argument("name", metavar="NAME", help="the agent, as `store agents` shows it")
        if name == "fork":
            action.add_argument("new", metavar="NEW", help="a name that is not in use")


# -- actions ---------------------------------------------------------------------------------------


def _change(args: argparse.Namespace) -> Report:
    return change(
        folder_at(args.store_dir), args.change, args.name, *([args.new] if "new" in args else [])
    )


def change(root: Path, act: str, name: str, *new: str) -> Report:
    """Pin, unpin or fork an agent. Raises StoreError."""
    records = AgentRecords(root)
    old = records.resolve(name)
    return {
        "folder": str(root),
        "act": act,
        "of": shown(old),
        "agent": fields(records.change(act, old, *new)),
    }


def delete(root: Path, name: str, yes: bool = False) -> Report:
    """Remove an agent and the records that only its path uses, and check the result: `clean`. Asks
    unless `yes`.

    Raises StoreError if the agent does not exist, or if there is no terminal for the question.
    """
    records = AgentRecords(root)
    real = records.resolve(name)
    share = records.share(real)
    if not yes:
        if not confirm(f"agent {shown(real)} and {records_text(sizes(share.own))} from {root}"):
            return {"folder": str(root), "agent": shown(real), "deleted": False, "clean": True}
        # Other agents may need some of the records since the question.
        share = records.share(real)
    records.remove(real, share)
    proof = records.proof(share)
    return {
        "folder": str(root),
        "agent": shown(real),
        "deleted": True,
        "removed": proof["gone"],
    } | proof


# -- words -----------------------------------------------------------------------------------------


def describe_listing(report: Report) -> str:
    """A table of the agents."""
    agents = report["agents"]
    lines = [f"{report['folder']}: {count(len(agents), 'agent')}"]
    if agents:
        rows = [["agent", "model", "tokens on disk", "own", "shared", "last used (UTC)", "pinned"]]
        lines += ["", *table(rows + [_cells(agent) for agent in agents], left=2)]
    return "\n".join(lines)


def _cells(agent: Report) -> list[str]:
    sizes = [human_bytes(agent[key]["bytes"]) for key in ("own", "shared")]
    on_disk = f"{agent['tokens_on_disk']:,} of {agent['tokens']:,}"
    used = agent["used"][:16].replace("T", " ")
    return [
        agent["shown"],
        shown(agent["model"]),
        on_disk,
        *sizes,
        used,
        "yes" if agent["pinned"] else "",
    ]


def describe_change(report: Report) -> str:
    agent, old = report["agent"], report["of"]
    words = {
        "pin": f"{old} is pinned: its records on disk stay when others are removed.",
        "unpin": f"{old} is no longer pinned.",
        "fork": f"{agent['shown']} continues from the same point as {old}: "
        f"{count(agent['tokens'], 'token')}.",
    }
    return words[report["act"]]


def describe_delete(report: Report) -> str:
    """What was removed, what stays and for which agents, and what the check afterwards found."""
    if not report["deleted"]:
        return f"Agent {report['agent']} stays."
    lines = [
        f"Removed agent {report['agent']} and {records_text(report['removed'])} that only it used."
    ]
    if stays := report["stays"]:
        names = sorted({name for stay in stays for name in stay["agents"]})
        names[SHOWN:] = [f"{len(names) - SHOWN:,} more"] if len(names) > SHOWN else []
        names += ["unnamed conversations"] if not all(stay["agents"] for stay in stays) else []
        sizes = {"records": len(stays), "bytes": sum(stay["bytes"] for stay in stays)}
        lines.append(f"Kept {records_text(sizes)} for {', '.join(names)}.")
    lines += [f"still there: {path}" for path in report["still_there"]] + [
        f"bad: {item['reason']}" for item in report["bad"]
    ]
    gone, whole = report["gone"]["records"], report["whole"]["records"]
    total = gone + len(report["still_there"])
    lines.append(
        f"Checked: {gone:,} of {total:,} are gone, and {whole:,} of {len(stays):,} are complete."
    )
    return "\n".join(lines)
