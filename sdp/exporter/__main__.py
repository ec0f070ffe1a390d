"""`python -m sdp.exporter`: serves GPU metrics until SIGTERM or SIGINT."""

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from sdp.console import say
from sdp.errors import SdpError, UserError

DEFAULT_PORT = 9850
STOP = frozenset({signal.SIGTERM, signal.SIGINT})


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sdp.exporter",
        description="Serve Prometheus metrics of this machine's NVIDIA GPUs and of the processes on them.",
        epilog="It needs the driver's library (libnvidia-ml.so.1), and the host's pids (hostPID) to name processes.",
    )
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help="0 chooses a free port (default: %(default)s)")
    parser.add_argument("--address", default="0.0.0.0", help="address to listen on; :: for IPv6 (default: %(default)s)")
    parser.add_argument("--timeout-s", type=float, default=2.0, help="time for one scrape (default: %(default)s)")
    parser.add_argument("--host-proc", type=Path, default="/proc", help="the host's /proc (default: %(default)s)")
    parser.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; return the exit code."""
    options = make_parser().parse_args(arguments)
    line = "%(asctime)s %(levelname)s %(message)s"
    logging.basicConfig(level=options.log_level.upper(), format=line, stream=sys.stderr)
    try:
        return serve(options)
    except SdpError as error:
        say(f"sdp.exporter: {error}")
        return error.exit_code


def serve(options: argparse.Namespace) -> int:
    if not 0 < options.timeout_s <= 60:
        raise UserError(f"--timeout-s: expected more than 0 and at most 60, got {options.timeout_s:g}")
    try:
        from prometheus_client import CollectorRegistry, start_http_server

        from sdp.exporter.collect import Collector
    except ModuleNotFoundError as error:
        raise UserError(f"{error.name} is not installed: pip install '.[exporter]' where sdp's code is") from error

    # Blocked in every thread and received by sigwait below, so that no handler interrupts other code.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP)
    registry = CollectorRegistry()
    node = os.environ.get("NODE_NAME", "") or os.uname().nodename
    collector = Collector(node, timeout_s=options.timeout_s, proc=options.host_proc)
    registry.register(collector)
    try:
        server, _ = start_http_server(options.port, options.address, registry)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        where = f"{options.address} port {options.port}"
        raise UserError(f"cannot listen on {where}: {reason}; choose another --port or --address") from error
    host = f"[{options.address}]" if ":" in options.address else options.address
    say(f"sdp.exporter: listening on http://{host}:{server.server_port}/metrics")
    collector.scrape()  # logs the GPUs, and opens the driver before the first client's scrape
    signal.sigwait(STOP)
    server.shutdown()
    say("sdp.exporter: stopped")
    return 0


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.stderr.flush()
    # Skip cleanup, which would hang if a thread hangs inside the driver's library.
    os._exit(code)
