"""Conformance: the checks as tests of a class. Needs pytest."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from .kit import CHECKS, run_check
from .outcome import NotCheckedError
from .subject import Subject


class Conformance:
    """A base class: a subclass whose name begins with Test has one test for each check.

    class TestMine(Conformance):
        config = {"model_type": "llama", ..}
        provider = my_plugin

    `config`: the config.json of a tiny model; or override make_model. `provider`: None for those that are installed.
    """

    config: ClassVar[dict[str, Any] | None] = None
    provider: ClassVar[Any] = None
    _subject: ClassVar[Subject | None] = None

    def make_model(self) -> Any:
        """A tiny mlx-lm model, or its config; made once for all tests of the class."""
        assert self.config is not None, f"{type(self).__name__} needs a config or a make_model()"
        return self.config

    def subject(self) -> Subject:
        """The model and its provider, as every check takes them."""
        cls = type(self)
        if cls.__dict__.get("_subject") is None:
            cls._subject = Subject(self.make_model(), cls.provider, cls.config)
        assert cls._subject is not None
        return cls._subject

    def run_check(self, check: str) -> None:
        try:
            print(run_check(check, self.subject()))
        except NotCheckedError as reason:
            pytest.skip(str(reason))


def _add_test(check: str) -> None:
    def test(self: Conformance) -> None:
        self.run_check(check)

    test.__name__, test.__doc__ = f"test_{check}", CHECKS[check].__doc__
    setattr(Conformance, test.__name__, test)


for _check in CHECKS:
    _add_test(_check)
