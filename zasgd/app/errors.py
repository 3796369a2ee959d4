"""Which exceptions are the user's to mend: one line each, with the exit code that fits."""

from __future__ import annotations

import errno

FAILED = 1
USAGE = 2
_OF_THE_MACHINE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE)
"""What the operating system refuses and a person can mend."""


def explain(error: BaseException) -> tuple[str, int] | None:
    """(line, exit code) for an error that a user can mend; None for a bug of ours, which keeps its traceback."""
    from zasgd.app.bench.crew import BenchError
    from zasgd.app.grid import GridError
    from zasgd.app.serve import RunFolderError
    from zasgd.app.simulate import SimulationError
    from zasgd.core.region import SharedMemoryError
    from zasgd.core.replay import ReplayError
    from zasgd.core.rules import RuleError
    from zasgd.launch import LaunchError
    from zasgd.launch.ports import port_owner
    from zasgd.net.client import BrokerError
    from zasgd.net.record import RecordError
    from zasgd.net.sockets import AddressError, BindError
    from zasgd.observe.events import EventLogError
    from zasgd.sim.scenario import ScenarioError
    from zasgd.train import DataError, DeviceError, MissingExtraError
    from zasgd.train.recipe import RecipeError

    if isinstance(error, BrokerError):
        return str(error), error.code
    if isinstance(error, BindError):
        owner = port_owner(error.port) if error.port else None
        return f"{error}{f' by {owner}' if owner else ''}; choose another port", USAGE
    usage = (
        RecipeError,
        DataError,
        DeviceError,
        MissingExtraError,
        AddressError,
        LaunchError,
        EventLogError,
        RecordError,
        RuleError,
        GridError,
        ScenarioError,
        BenchError,
    )
    if isinstance(error, (*usage, RunFolderError)):
        return str(error), USAGE
    if isinstance(error, ReplayError | SimulationError | SharedMemoryError):
        return str(error), FAILED
    if isinstance(error, MemoryError):
        return f"not enough memory: {str(error)[:200] or 'use a smaller model or fewer workers'}", FAILED
    if isinstance(error, OSError) and error.errno in _OF_THE_MACHINE:
        return f"{error.strerror}{f': {error.filename}' if error.filename else ''}", FAILED
    return None
