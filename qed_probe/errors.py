"""What can go wrong, in one shallow tree; each message says what was expected, what was found and where."""


class QedProbeError(Exception):
    """Every error that a user can cause or mend; the command line prints it as one line."""


class InputError(QedProbeError):
    """An argument, a prompt or a file that cannot be used."""


class CheckpointError(QedProbeError):
    """A directory that is not a checkpoint, or one whose weights do not fit its configuration."""


class StoreError(QedProbeError):
    """A store that cannot be read, written, resumed or joined with another."""


class CheckFailed(QedProbeError):  # noqa: N818 - it names an outcome: the check ran and did not hold
    """Something that must hold does not: a replay agrees with its trace, a loss is finite."""
