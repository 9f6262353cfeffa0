"""Errors meant for the person at the keyboard."""

from __future__ import annotations


class UserError(ValueError):
    """Something the user can mend: the message names the place, the value and the way out.

    The command line prints it without a traceback and exits with code 2.
    """


class RunStopped(RuntimeError):
    """A run that must not go on (stale sampler weights, non-finite updates in a row)."""
