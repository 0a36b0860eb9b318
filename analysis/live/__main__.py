"""A page of the runs that keeps itself up to date: ``python -m analysis.live [--root runs]``, or ``make serve``.

For this machine's own browser (over SSH: ``ssh -L 8000:localhost:8000 HOST``). Only reads the store; Ctrl-C ends it.
"""

from __future__ import annotations

import argparse
import errno
import sys
from collections.abc import Sequence
from pathlib import Path

from analysis.live.server import HOST, Server

DEFAULT_PORT = 8000


def main(arguments: Sequence[str] | None = None) -> int:
    """Serves until Ctrl-C. Returns the exit code: 0, or 2 for a port that cannot be had."""
    parser = argparse.ArgumentParser(prog="python -m analysis.live", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--root", default="runs")
    parser.add_argument("--port", default=str(DEFAULT_PORT), help=f"default: {DEFAULT_PORT}; 0: any free one")
    options = parser.parse_args(arguments)
    if not options.port.isdecimal() or int(options.port) > 65535:
        print(f"error: port: {options.port!r} is not allowed; a number from 0 (any free one) to 65535", file=sys.stderr)
        return 2
    try:
        server = Server(Path(options.root), int(options.port))
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        why = "is taken; choose another: make serve PORT=8001" if taken else f"cannot be had: {error.strerror}"
        print(f"error: port: {options.port} {why}", file=sys.stderr)
        return 2
    try:
        print(f"{options.root} is shown at http://{HOST}:{server.server_port}/ (Ctrl-C ends it)", flush=True)
        server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        print("ended")
    finally:
        server.server_close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
