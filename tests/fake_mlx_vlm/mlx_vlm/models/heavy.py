"""A module with a dependency that is not installed."""

import a_package_that_is_not_there  # noqa: F401
