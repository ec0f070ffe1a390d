"""A certificate for a server on this machine, and the authority by which a client trusts it."""

import ssl
import tempfile
from collections.abc import Sequence
from pathlib import Path

import trustme


class Certificate:
    """The server's TLS context, and a client's CA file."""

    def __init__(self, hosts: Sequence[str]):
        authority = trustme.CA()
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.set_alpn_protocols(["http/1.1"])
        authority.issue_cert(*hosts).configure_cert(self.context)
        self._folder = tempfile.TemporaryDirectory(prefix="sdp-tests-tls-")
        self.path = Path(self._folder.name) / "authority.pem"
        """The CA file for clients."""
        authority.cert_pem.write_to_path(self.path)

    def close(self) -> None:
        self._folder.cleanup()
