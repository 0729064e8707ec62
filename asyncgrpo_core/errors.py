"""The error types of the project.

Every message says what went wrong, where, and what to change. All errors survive pickling (they cross
process boundaries) and keep their cause. `exit_code` is what the command line ends with.
"""

from __future__ import annotations


class AsyncGRPOError(Exception):
    """Root of every error this project raises on purpose.

    Args:
        message: what went wrong and where, one or two sentences.
        fix: what to change, one sentence; appended to the message.
    """

    exit_code = 1

    def __init__(self, message: str, fix: str | None = None) -> None:
        self.message = message
        self.fix = fix
        super().__init__(message if fix is None else f"{message} {fix}")

    def __reduce__(self):  # Exception pickles *args*; rebuild from our own two fields
        return (type(self), (self.message, self.fix))


class ConfigError(AsyncGRPOError, ValueError):
    """A setting, argument or input file is wrong; nothing was started. Exit code 2."""

    exit_code = 2


class DataError(ConfigError):
    """A dataset does not have the shape that training needs. Exit code 2."""


class ServerError(AsyncGRPOError):
    """A vLLM server did not start, died, refused a call or contradicts the config."""


class ServerRefusedError(ServerError):
    """A vLLM server answered a call, with something else than success; it is there."""


class ServerMismatchError(ServerError):
    """A running server's reported settings contradict the config; names the flag to change."""

    exit_code = 2


class WeightSyncError(AsyncGRPOError):
    """Weights did not reach a server, or reached it wrong."""


class RolloutError(AsyncGRPOError):
    """The rollout worker failed or hung; the message holds the worker's traceback when there is one."""


class RewardError(RolloutError):
    """A reward function returned something that is no reward."""


class RankLostError(AsyncGRPOError):
    """A trainer rank ended, or said nothing for too long, while another one waited for it."""


class LedgerError(AsyncGRPOError):
    """The exactly-once bookkeeping was contradicted, or its file could not be written."""


class CheckpointError(AsyncGRPOError):
    """A checkpoint is missing, incomplete or does not fit this run."""


class NonFiniteError(AsyncGRPOError):
    """The loss or its gradient was not finite in several steps in a row; says where their rows are."""


class TrackerError(AsyncGRPOError):
    """MLflow or Prefect cannot be reached or refused a call at the start of a run."""


class RunInterrupted(AsyncGRPOError):
    """The run was asked to stop (signal or cancellation). Exit code 130."""

    exit_code = 130
