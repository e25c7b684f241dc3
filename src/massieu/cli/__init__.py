"""The command line. `main` readies the process and runs `commands`; how it ends is said here."""

import os
import sys

from massieu.cli import streams

INTERRUPTED = 130


def main() -> None:
    """Run the command line."""
    # Threads that wait for each other soon sleep: where other processes have the cores, one that looped would keep the one
    # that it waits for from running. GNU's OpenMP reads this when torch is loaded, which is later.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    streams.ready()
    try:
        try:
            _run()
        finally:
            # Python remembers that KeyboardInterrupt left an `exec`, of which imports have many, and would in the end take
            # SIGINT for what ended the process, caught or not and whatever the exit status. Another `exec` clears that.
            exec("")
            sys.stdout.flush()
    except streams.OutputLost as lost:
        if not lost.piped:
            streams.say(str(lost))
        sys.exit(lost.status)
    except KeyboardInterrupt:  # while the commands themselves were imported
        streams.say("interrupted")
        sys.exit(INTERRUPTED)


def _run() -> None:
    from massieu.cli.commands import app

    app()
