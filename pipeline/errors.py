"""Errors that end a command, and the exit code each one stands for."""


class WinnowError(Exception):
    """Work failed after it had begun. Exit code 1."""

    exit_code = 1


class Refused(WinnowError):
    """The configuration or the input cannot be worked with; nothing was started. Exit code 2."""

    exit_code = 2
