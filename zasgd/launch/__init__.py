"""Running a whole job on this machine: the processes of a run, from their start to their last trace.

This file stays light: the forkserver imports the package before it forks, and what it imports every worker
carries.
"""


class LaunchError(Exception):
    """A local process or port could not be had; the text is one line for the user."""
