"""Checks of the installation: versions, the patch, the store, the port.

Computes nothing on the device.
"""

from __future__ import annotations

import errno
import http.client
import json
import platform
import shutil
import socket
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from ... import __version__, mlx_lm_compat
from ...config import StoreConfig
from ...formatting import human_bytes
from ...model_files.device import mlx_problem
from ...store.paths import check_usable, default_folder
from .. import patch, store
from .finding import Finding, State

PACKAGE = "mlx-blockpool"
HOST = "127.0.0.1"
SECONDS = 2.0


def versions() -> list[Finding]:
    """Compare the installed versions with those that the package needs, and check the names that
    it imports from mlx-lm.
    """
    needed = [Requirement(text) for text in metadata.requires(PACKAGE) or ()]
    found = {each.name: _version(each.name) for each in needed if each.marker is None}
    wrong = [each for each in needed if each.marker is None and not _fits(each, found[each.name])]
    figures = {
        PACKAGE: __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        **found,
    }
    shown = ", ".join(f"{name} {figures[name]}" for name in (PACKAGE, "python", "mlx", "mlx-lm"))
    if not wrong:
        found_all = Finding("versions", "ok", f"{shown}, on {figures['system']}.", figures=figures)
        # mlx can be imported, and mlx-lm has every name that the package imports from it.
        problem = mlx_problem()
        return [found_all, _names() if problem is None else Finding("mlx", "problem", *problem)]
    texts = [
        f"{each.name} {found[each.name] or 'is missing'}, needed {each.specifier or 'any'}"
        for each in wrong
    ]
    command = " ".join(f"'{each.name}{each.specifier}'" for each in wrong)
    return [
        Finding(
            "versions",
            "problem",
            f"{shown}. These do not fit: {'; '.join(texts)}.",
            f"pip install {command}",
            figures,
        )
    ]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _fits(needed: Requirement, version: str | None) -> bool:
    return version is not None and needed.specifier.contains(version, prereleases=True)


def _names() -> Finding:
    """Check that mlx-lm has every name that the package imports from it."""
    missing = []
    for name in mlx_lm_compat.EXPORTS:
        try:
            getattr(mlx_lm_compat, name)
        except Exception:
            missing.append(mlx_lm_compat.EXPORTS[name])
    if missing:
        advice = f"pip install --force-reinstall 'mlx-lm{mlx_lm_compat.SUPPORTED}'"
        return Finding(
            "mlx-lm", "problem", f"mlx-lm lacks {', '.join(missing)}.", advice, {"missing": missing}
        )
    return Finding(
        "mlx-lm",
        "ok",
        f"mlx-lm has all {len(mlx_lm_compat.EXPORTS)} names that the package imports.",
    )


def patch_state() -> list[Finding]:
    """Report whether mlx-lm's own server has been patched."""
    found = patch.status()
    is_broken = bool({"changed", "missing"} & {found.state, *found.files.values()})
    words = patch.describe(found).splitlines()
    return [
        Finding(
            "patch",
            "problem" if is_broken else "ok",
            f"{words[0]}.",
            words[-1] if is_broken else "",
            {"state": found.state},
        )
    ]


def store_state(folder: Path | None) -> list[Finding]:
    """The records on disk by name, length and header, and the free space.

    Raises StoreError if serve would refuse the folder.
    """
    root = folder or default_folder()
    check_usable(root)
    existing = next(path for path in (root, *root.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    figures = {"folder": str(root), "free_bytes": free}
    state: State = "ok"
    text, advice = f"{root} does not exist yet; the server creates it.", ""
    if root.is_dir():
        report = store.check(root)
        figures |= {key: report[key] for key in ("records", "bytes", "clean")}
        text = f"{root}: {store.describe_check(report).splitlines()[-1]}"
        if not report["clean"]:
            state, advice = "warning", "mlx-blockpool store check --fix"
    return [Finding("store", state, text, advice, figures), _space(free)]


def _space(free: int) -> Finding:
    needed = StoreConfig().min_free_bytes
    if free < needed:
        text = (
            f"{human_bytes(free)} are free on the store's disk; nothing is stored below "
            f"{human_bytes(needed)}."
        )
        return Finding(
            "disk space",
            "warning",
            text,
            "Free some space, or give --store-dir a folder on another disk.",
        )
    return Finding("disk space", "ok", f"{human_bytes(free)} are free on the store's disk.")


def port_state(port: int) -> list[Finding]:
    """Check that the server can listen."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                text = f"Cannot listen on port {port}: {error}."
                return [Finding("port", "problem", text, "Choose another: --port N.")]
        else:
            return [Finding("port", "ok", f"Port {port} is free.", figures={"port": port})]
    state: State = "problem"
    text = f"Another program uses port {port}."
    advice = f"Give serve another one: --port {port + 1}"
    if _is_ours(port):
        state, text = "note", f"A server of mlx-blockpool answers on port {port}."
        advice = f"mlx-blockpool top --url http://{HOST}:{port}"
    return [Finding("port", state, text, advice, {"port": port})]


def _is_ours(port: int) -> bool:
    """Return whether our server listens on a port."""
    connection = http.client.HTTPConnection(HOST, port, timeout=SECONDS)
    try:
        # It needs no key. The body is the same as that of mlx-lm's server, which does not send
        # X-Request-Id.
        connection.request("GET", "/health")
        response = connection.getresponse()
        found = json.loads(response.read())
        return (
            isinstance(found, dict)
            and "status" in found
            and (response.getheader("X-Request-Id") or "").startswith("req_")
        )
    except (OSError, http.client.HTTPException, ValueError):
        return False
    finally:
        connection.close()
