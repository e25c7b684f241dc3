"""The command line: `main` prepares the process, runs `commands` and sets the exit status."""

import os
import sys

from massieu.cli import streams

INTERRUPTED = 130
"""The exit status after SIGINT."""


def main() -> None:
    """Run the command line."""
    # Let threads that wait for each other sleep soon. If other processes use the cores, a thread that waits in a loop keeps the
    # one that it waits for from running. GNU's OpenMP reads this variable when torch is loaded, which is later.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    streams.ready()
    try:
        try:
            _run()
        finally:
            # Imports run by `exec`. Python remembers a KeyboardInterrupt that left one, even if it was caught, and would end
            # the process by SIGINT whatever the exit status. Another `exec` clears that.
            exec("")
            sys.stdout.flush()
    except streams.OutputLost as lost:
        if not lost.piped:
            streams.say(str(lost))
        sys.exit(lost.status)
    except KeyboardInterrupt:  # While the commands themselves were imported.
        streams.say("interrupted")
        sys.exit(INTERRUPTED)


def _run() -> None:
    from massieu.cli.commands import OWN_PROCESS, app

    app(obj=OWN_PROCESS)
