"""`python -m sdp.exporter`: serves GPU metrics until it is told to stop."""

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


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="python -m sdp.exporter",
        description="Serve what NVIDIA's driver says of the GPUs here, and whose processes are on them, to Prometheus.",
        epilog="It needs the driver's library (libnvidia-ml.so.1), and the host's pids (hostPID) to name processes.",
    )
    found.add_argument("--port", type=int, default=DEFAULT_PORT, help="0 takes a free one (default: %(default)s)")
    found.add_argument("--address", default="0.0.0.0", help="address to listen on; :: for IPv6 (default: %(default)s)")
    found.add_argument(
        "--web-config", type=Path, metavar="FILE", help="TLS and users, as Prometheus' exporters have it"
    )
    found.add_argument("--timeout-s", type=float, default=2.0, help="time for one scrape (default: %(default)s)")
    found.add_argument(
        "--host-proc",
        type=Path,
        default=Path("/proc"),
        metavar="FOLDER",
        help="the host's /proc (default: %(default)s)",
    )
    found.add_argument(
        "--pod-resources",
        type=Path,
        metavar="SOCKET",
        help="the kubelet's pod-resources socket (/var/lib/kubelet/pod-resources/kubelet.sock), for the names of pods",
    )
    found.add_argument("--node", default="", help="the label `node` (default: $NODE_NAME, or else the host's name)")
    found.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; the exit code."""
    options = parser().parse_args(arguments)
    logging.basicConfig(
        level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )
    try:
        return serve(options)
    except SdpError as error:
        say(f"sdp.exporter: {error}")
        return error.exit_code


def serve(options: argparse.Namespace) -> int:
    if not 0 < options.timeout_s <= 60:
        raise UserError(f"--timeout-s: expected more than 0 and at most 60, got {options.timeout_s:g}")
    if not (options.host_proc / "self").exists():
        raise UserError(f"--host-proc: {options.host_proc} is no proc file system")
    try:
        from prometheus_client import CollectorRegistry, ProcessCollector

        from sdp.exporter.collect import Collector, Settings
        from sdp.exporter.web import Server
    except ModuleNotFoundError as error:
        raise UserError(f"{error.name} is not installed: pip install 'sdp[exporter]'") from error

    # Blocked in every thread, and taken by sigwait below: no handler runs in the middle of something.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP)
    registry = CollectorRegistry()
    ProcessCollector(namespace="sdp_exporter", registry=registry)
    collector = Collector(
        Settings(
            node=options.node or os.environ.get("NODE_NAME", "") or os.uname().nodename,
            timeout_s=options.timeout_s,
            proc=options.host_proc,
            pod_resources=options.pod_resources,
        )
    )
    registry.register(collector)
    server = Server(options.address, options.port, registry, options.web_config)
    server.start()
    say(f"sdp.exporter: listening on {server.url}")
    collector.scrape()  # so that the log says at once what there is, and nobody's first scrape opens the driver
    signal.sigwait(STOP)
    server.stop()
    collector.stop()
    say("sdp.exporter: stopped")
    return 0


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.stderr.flush()
    # Threads may be inside the driver's library, for ever if it hangs: run none of its own cleanup.
    os._exit(code)
