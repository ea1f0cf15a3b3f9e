"""Exit codes of the commands."""

EXIT_OK = 0
EXIT_BROKEN = 1  # ``doctor``: something does not work
EXIT_FAILED = 1  # ``profile``: the script did
EXIT_BAD_INPUT = 2  # as argparse's own
EXIT_CONDITION = 3  # a --fail-if holds, and the script itself had succeeded
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells have it
