"""Hosts made of Linux namespaces, joined by links that can be counted, slowed and cut.

A host has its own network, process ids, name and /tmp/ray; it shares the files. Each pair of hosts has a link of its
own (a veth pair), so that a link's counters tell who sent how much to whom. Nothing gets a name on the machine: a host
lasts as long as its first process, which ends with the test.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

from tests.programs import ROOT
from tests.waiting import until

MBIT_S = 200.0
"""The pace of a link in each direction."""
DELAY_MS = 1.0
_SPACES = ("--net", "--uts", "--pid", "--mount", "--ipc")
_START_S, _COMMAND_S = 30.0, 30.0


def obstacle() -> str | None:
    """Return why this machine cannot make hosts, or None if it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs root on Linux, to make network namespaces"
    if missing := [name for name in ("unshare", "nsenter", "mount") if shutil.which(name) is None]:
        return f"needs {', '.join(missing)}, of util-linux"
    made = subprocess.run(["unshare", *_SPACES, "--fork", "true"], capture_output=True, text=True, check=False)
    return f"needs namespaces, which this machine refuses ({made.stderr.strip()})" if made.returncode else None


@dataclass
class Host:
    """A running host."""

    name: str
    address: str
    folder: Path
    holder: "subprocess.Popen[bytes]" = field(repr=False)
    pid: int = 0
    """Its first process."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables for every command, such as a clock's."""

    def start(
        self, command: Sequence[str | Path], environment: Mapping[str, str] | None = None, log: Path | None = None
    ) -> "subprocess.Popen[bytes]":
        """Start a command here; the process returned is one outside that waits for it."""
        with (log or self.folder / "log").open("ab") as sink:
            return subprocess.Popen(
                self.entered(command),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                env={**os.environ, "PYTHONPATH": str(ROOT), **self.environment, **(environment or {})},
            )

    def run(self, command: Sequence[str], lines: str = "") -> str:
        """Run a short command here, and return its output."""
        done = subprocess.run(
            self.entered(command),
            input=lines,
            capture_output=True,
            text=True,
            env={**os.environ, **self.environment},
            timeout=_COMMAND_S,
            check=False,
        )
        assert done.returncode == 0, f"{self.name}: {' '.join(command)}: {done.stderr.strip()}"
        return done.stdout

    def entered(self, command: Sequence[str | Path]) -> list[str]:
        """Return the command that runs a command here."""
        return ["nsenter", f"--target={self.pid}", *_SPACES, f"--wd={ROOT}", "--", *map(str, command)]

    def listens(self, port: int) -> bool:
        """Return whether a process here listens on a TCP port."""
        lines = [line.split() for kind in ("tcp", "tcp6") for line in self._read(f"net/{kind}").splitlines()[1:]]
        return any(line[3] == "0A" and int(line[1].rpartition(":")[2], 16) == port for line in lines)

    def _read(self, name: str) -> str:
        return Path(f"/proc/{self.pid}/{name}").read_text()

    def sent(self, to: "Host") -> int:
        """Return the bytes sent over the link to another host so far."""
        statistics = f"root{self.folder}/sys/class/net/{_link(to)}/statistics/tx_bytes"
        return int(self._read(statistics))

    def end(self) -> None:
        """End all processes here, and with them the namespaces."""
        if self.holder.returncode is not None:
            return
        self.holder.kill()  # which kills the first process
        assert self.holder.stdin is not None
        self.holder.stdin.close()
        self.holder.wait()
        until(lambda: not Path(f"/proc/{self.pid}").exists(), f"the end of {self.name}", _START_S)


class Network:
    """Hosts, and the links between them."""

    def __init__(self, hosts: Mapping[str, Host]) -> None:
        self.hosts = hosts
        self._has_netem = self._try_netem()

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    def join(self) -> None:
        """Make the links, and the routes over them."""
        for one, other in combinations(self.hosts.values(), 2):
            ends = f"link add {_link(other)} netns {one.pid} type veth peer name {_link(one)} netns {other.pid}\n"
            subprocess.run(["ip", "-batch", "-"], input=ends, text=True, check=True, timeout=_COMMAND_S)
        for host in self.hosts.values():
            lines = [
                "link set lo up",
                f"address add {host.address}/32 dev lo",
                "link add nowhere type veth peer name nowhere-end",  # and stays down: it discards what it gets
            ]
            host.run(["ip", "-batch", "-"], "\n".join(lines))
            self._connect(host)
            for other in self.hosts.values():
                if other is not host:
                    host.run(["tc", "qdisc", "add", "dev", _link(other), "ingress"])
        for names in combinations(self.hosts, 2):
            self.pace(*names)

    def _connect(self, host: Host) -> None:
        """Bring a host's links up, and make its routes."""
        others = [other for other in self.hosts.values() if other is not host]
        lines = [f"link set {_link(other)} up" for other in others]
        lines += [f"route add {other.address}/32 dev {_link(other)} src {host.address}" for other in others]
        # Programs look for their own address by a route to a public one, which leads nowhere here.
        lines.append(f"route add default dev {_link(others[0])} src {host.address}")
        host.run(["ip", "-batch", "-"], "\n".join(lines))

    def pace(self, one: str, other: str, mbit_s: float = MBIT_S, delay_ms: float = DELAY_MS) -> None:
        """Give a link a pace, and a delay where the kernel can do it."""
        burst = max(16_000, int(mbit_s * 1e6 / 8 / 100))
        for sender, receiver in ((self[one], self[other]), (self[other], self[one])):
            device = ["dev", _link(receiver)]
            rate = ["tbf", "rate", f"{mbit_s}mbit", "burst", str(burst), "latency", "200ms"]
            sender.run(["tc", "qdisc", "replace", *device, "root", "handle", "1:", *rate])
            if self._has_netem:
                delay = ["netem", "delay", f"{delay_ms}ms"]
                sender.run(["tc", "qdisc", "replace", *device, "parent", "1:1", "handle", "2:", *delay])

    def cut(self, name: str) -> None:
        """Lose all packets between a host and the others, without a word to either."""
        for receiver, sender in self._ends(name):
            everything = ["protocol", "all", "u32", "match", "u32", "0", "0"]
            discard = ["action", "mirred", "egress", "redirect", "dev", "nowhere"]
            receiver.run(["tc", "filter", "add", "dev", _link(sender), "parent", "ffff:", *everything, *discard])

    def mend(self, name: str) -> None:
        """Undo `cut`."""
        for receiver, sender in self._ends(name):
            receiver.run(["tc", "filter", "del", "dev", _link(sender), "parent", "ffff:"])

    @contextmanager
    def partition(self, name: str) -> Iterator[None]:
        """Cut a host off inside the block."""
        self.cut(name)
        try:
            yield
        finally:
            self.mend(name)

    @contextmanager
    def unplugged(self, name: str) -> Iterator[None]:
        """Take a host's links down inside the block, so that it has no route to any other."""
        host, others = self[name], [other for other in self.hosts.values() if other.name != name]
        host.run(["ip", "-batch", "-"], "\n".join(f"link set {_link(other)} down" for other in others))
        try:
            yield
        finally:
            self._connect(host)

    def traffic(self) -> dict[tuple[str, str], int]:
        """Return the bytes that each host has sent to each other one."""
        return {
            (one.name, other.name): one.sent(other)
            for one in self.hosts.values()
            for other in self.hosts.values()
            if one is not other
        }

    def _ends(self, name: str) -> Iterator[tuple[Host, Host]]:
        for other in self.hosts.values():
            if other.name != name:
                yield self[name], other
                yield other, self[name]

    def _try_netem(self) -> bool:
        host = next(iter(self.hosts.values()))
        command = host.entered(["tc", "qdisc", "add", "dev", "lo", "root", "netem"])
        if subprocess.run(command, capture_output=True, check=False).returncode:
            return False
        host.run(["tc", "qdisc", "del", "dev", "lo", "root"])
        return True


@contextmanager
def network(folder: Path, *names: str) -> Iterator[Network]:
    """Make hosts of these names, each linked to each other one, and end them and everything on them."""
    addresses = {name: f"10.77.0.{number}" for number, name in enumerate(names, 1)}
    listed = "".join(f"{address} {name}\n" for name, address in {"localhost": "127.0.0.1", **addresses}.items())
    with ExitStack() as stack:
        hosts = {name: _start(stack, folder / name, name, address, listed) for name, address in addresses.items()}
        made = Network(hosts)
        made.join()
        yield made


def _start(stack: ExitStack, folder: Path, name: str, address: str, listed: str) -> Host:
    (folder / "sys").mkdir(parents=True)
    (folder / "hosts").write_text(listed)
    first = [sys.executable, str(Path(__file__).with_name("first.py")), name, str(folder)]
    with (folder / "log").open("wb") as log:
        holder = subprocess.Popen(
            ["unshare", *_SPACES, "--fork", "--mount-proc", "--kill-child", *first],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
        )
    host = Host(name, address, folder, holder)
    stack.callback(host.end)
    children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children")
    host.pid = int(until(lambda: children.read_text().split() or _ended(holder, folder), name, _START_S)[0])
    until(lambda: (folder / "ready").exists() or _ended(holder, folder), f"{name} is up", _START_S)
    return host


def _ended(holder: "subprocess.Popen[bytes]", folder: Path) -> list[str]:
    assert holder.poll() is None, (folder / "log").read_text()
    return []


def _link(to: Host) -> str:
    return f"to-{to.name}"
