"""Which exceptions are the user's to mend: one line each, with the exit code that fits."""

from __future__ import annotations

USAGE = 2
NO_BROKER = 3


def explain(error: BaseException) -> tuple[str, int] | None:
    """(line, exit code) for an error that a user can mend; None for a bug of ours, which keeps its traceback."""
    from zasgd.launch import LaunchError
    from zasgd.launch.ports import port_owner
    from zasgd.net.client import BrokerError
    from zasgd.net.sockets import AddressError, BindError
    from zasgd.observe.events import EventLogError
    from zasgd.train import DataError, DeviceError, MissingExtraError
    from zasgd.train.recipe import RecipeError

    if isinstance(error, BrokerError):
        return str(error), error.code
    if isinstance(error, BindError):
        owner = port_owner(error.port) if error.port else None
        return f"{error}{f' by {owner}' if owner else ''}; choose another port", USAGE
    usage = (RecipeError, DataError, DeviceError, MissingExtraError, AddressError, LaunchError, EventLogError)
    if isinstance(error, usage):
        return str(error), USAGE
    return None
