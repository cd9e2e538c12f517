"""The exceptions a user can meet. Each message says what was got, what is allowed and what to do next.

UpswingError
├── ConfigError      a recipe, option, dataset, tool or verifier is wrong; raised before any model loads (exit code 2)
├── ModelNotFound    (a ConfigError) the model named isn't where it was looked for
├── InvalidTrajectory  the validator refused a trajectory: a bug in Upswing or in a custom engine
└── EnvironmentBroken  raised by an environment that can't go on; the trajectory is `errored`, never scored
    └── SandboxUnavailable  (in `verify.sandbox`) code can't be run safely here, or the sandbox died
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UpswingError(Exception):
    """Base class of every error that Upswing raises on purpose."""


class ConfigError(UpswingError, ValueError):
    """The user's input is wrong. The command line prints the message on one line and exits with 2."""


class ModelNotFound(ConfigError):
    """No model at the path, hub id or alias given."""


class InvalidTrajectory(UpswingError, AssertionError):
    """A trajectory breaks the exact-token contract and must not be trained on."""


class EnvironmentBroken(UpswingError, RuntimeError):
    """An environment can't go on; its trajectory ends as `errored` and never counts as reward 0."""


def nearest(name: str, allowed: Iterable[str]) -> str | None:
    """The allowed name closest to `name`, or None when nothing is close."""
    found = difflib.get_close_matches(name, list(allowed), n=1, cutoff=0.5)
    return found[0] if found else None


def did_you_mean(name: str, allowed: Iterable[str]) -> str:
    """`'; did you mean 'x'?'` for the nearest allowed name, or the empty string."""
    close = nearest(name, allowed)
    return f"; did you mean '{close}'?" if close else ""
