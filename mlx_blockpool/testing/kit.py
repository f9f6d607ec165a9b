"""The list of all checks in order, and what runs them: a function for scripts, and a class for
pytest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from .checks import (
    check_batch,
    check_config,
    check_logits,
    check_others,
    check_provider,
    check_quantised,
    check_restart,
    check_spec_of_model,
    check_warm,
    check_wrap,
)
from .subject import ConformanceError, NotCheckedError, Subject

CHECKS: dict[str, Callable[[Subject], str]] = {
    "provider": check_provider,
    "others": check_others,
    "spec": check_spec_of_model,
    "config": check_config,
    "logits": check_logits,
    "wrap": check_wrap,
    "warm": check_warm,
    "restart": check_restart,
    "batch": check_batch,
    "quantised": check_quantised,
}
# These checks find errors in a spec; the others need a correct one.
OF_SPEC = ("provider", "others", "spec")
PASSED, FAILED, NOT_CHECKED = "passed", "FAILED", "not checked"


@dataclass(frozen=True)
class Result:
    """The result of one check: "passed", "FAILED" or "not checked". `text`: what was checked or
    found, or why not.
    """

    check: str
    outcome: str
    text: str

    def __str__(self) -> str:
        return f"{self.check}: {self.outcome}. {self.text}"


def conformance(model: Any, provider: Any = None) -> Iterator[Result]:
    """Yield the result of each check when it is complete; the arguments are those of Subject."""
    subject = Subject(model, provider)
    for check in CHECKS:
        yield result_of(check, subject)


def result_of(check: str, subject: Subject) -> Result:
    """Like run_check(), but errors are part of the result."""
    try:
        return Result(check, PASSED, run_check(check, subject))
    except NotCheckedError as reason:
        return Result(check, NOT_CHECKED, str(reason))
    except Exception as error:
        # Models, plugins and their caches are foreign code and may raise anything.
        name = "" if isinstance(error, ConformanceError) else f"{type(error).__name__}: "
        return Result(check, FAILED, f"{name}{error}")


def run_check(check: str, subject: Subject) -> str:
    """Run one of CHECKS; returns what it checked.

    Raises ConformanceError, or NotCheckedError if the check does not apply.
    """
    if check not in OF_SPEC and subject.wrong is not None:
        raise NotCheckedError(f"Needs a correct spec first: {subject.wrong}")
    return CHECKS[check](subject)


class Conformance:
    """A base class: a subclass whose name begins with Test has one test for each check.

    class TestMine(Conformance):
        config = {"model_type": "llama", ..}
        provider = my_plugin

    `config`: the config.json of a tiny model; or override make_model. `provider`: None for the
    installed ones.
    """

    config: ClassVar[dict[str, Any] | None] = None
    provider: ClassVar[Any] = None
    _subject: ClassVar[Subject]

    def make_model(self) -> Any:
        """A tiny mlx-lm model, or its config; made once for all tests of the class."""
        assert self.config is not None, f"{type(self).__name__} needs a config or a make_model()"
        return self.config


def _add_test(check: str) -> None:
    def test(self: Conformance) -> None:
        cls = type(self)
        if "_subject" not in vars(cls):
            cls._subject = Subject(self.make_model(), cls.provider)
        print(run_check(check, cls._subject))

    test.__name__, test.__doc__ = f"test_{check}", CHECKS[check].__doc__
    setattr(Conformance, test.__name__, test)


for _check in CHECKS:
    _add_test(_check)
