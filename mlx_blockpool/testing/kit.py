"""The list of all checks in order, and the functions that run them."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from typing import Any

from .batches import check_batch, check_quantised
from .checks import check_config, check_logits, check_others, check_provider, check_spec_of_model, check_wrap
from .outcome import FAILED, NOT_CHECKED, PASSED, ConformanceError, NotCheckedError, Result
from .prefixes import check_damage, check_restart, check_warm
from .subject import Subject

CHECKS: dict[str, Callable[[Subject], str]] = {
    "provider": check_provider,
    "others": check_others,
    "spec": check_spec_of_model,
    "config": check_config,
    "logits": check_logits,
    "wrap": check_wrap,
    "warm": check_warm,
    "batch": check_batch,
    "quantised": check_quantised,
    "restart": check_restart,
    "damage": check_damage,
}
# These find out what is wrong with a spec; the others need a right one.
OF_SPEC = ("provider", "others", "spec")


def conformance(model: Any, provider: Any = None, config: dict[str, Any] | None = None) -> Iterator[Result]:
    """Yield the result of each check when it is complete; the arguments are those of Subject."""
    try:
        subject = Subject(model, provider, config)
    except ConformanceError as error:
        yield Result("model", FAILED, str(error))
        return
    for check in CHECKS:
        yield result_of(check, subject)


def result_of(check: str, subject: Subject) -> Result:
    """Like run_check(), but failures are part of the result."""
    try:
        return Result(check, PASSED, run_check(check, subject))
    except NotCheckedError as reason:
        return Result(check, NOT_CHECKED, str(reason))
    except ConformanceError as error:
        return Result(check, FAILED, str(error))


def run_check(check: str, subject: Subject) -> str:
    """Run one of CHECKS; returns what it checked. Raises ConformanceError, or NotCheckedError if the check does not apply."""
    try:
        if check not in OF_SPEC and subject.wrong is not None:
            raise NotCheckedError(f"Needs a right spec first: {subject.wrong}")
        return CHECKS[check](subject)
    except (ConformanceError, NotCheckedError):
        raise
    except Exception as error:
        # A model and a plugin are anybody's code, and so are the caches that they lead to.
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise ConformanceError(
            f"{type(error).__name__}: {error} ({last.filename}, line {last.lineno})", "no error", "See the traceback."
        ) from error
