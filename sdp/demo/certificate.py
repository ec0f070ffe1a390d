"""A self-signed certificate for a server on this machine, made when it starts and gone when it stops."""

import datetime
import ipaddress
import ssl
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sdp.errors import UserError

if TYPE_CHECKING:
    from cryptography import x509


class Certificate:
    """The server's TLS context, and the file by which a client may trust it."""

    def __init__(self, hosts: Sequence[str]):
        certificate, key = _make(hosts)
        self._folder = tempfile.TemporaryDirectory(prefix="sdp-demo-tls-")
        self.path = Path(self._folder.name) / "certificate.pem"
        """What a client gives as its CA file."""
        self.path.write_bytes(certificate)
        key_path = Path(self._folder.name) / "key.pem"
        key_path.touch(mode=0o600)
        key_path.write_bytes(key)
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.load_cert_chain(self.path, key_path)
        self.context.set_alpn_protocols(["http/1.1"])
        key_path.unlink()

    def close(self) -> None:
        self._folder.cleanup()


def _make(hosts: Sequence[str]) -> tuple[bytes, bytes]:
    """Certificate and key, both PEM."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as error:
        raise UserError("the demo's TLS server: package cryptography is missing; pip install cryptography") from error

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "sdp demo server")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=30))
        .add_extension(x509.SubjectAlternativeName([_alternative(host) for host in hosts]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(
            x509.KeyUsage(
                digital_signature=True,
                key_cert_sign=True,
                content_commitment=False,
                key_encipherment=False,
                data_encipherment=False,
                key_agreement=False,
                crl_sign=False,
                encipher_only=False,
                decipher_only=False,
            ),
            critical=True,
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return (
        certificate.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
    )


def _alternative(host: str) -> "x509.GeneralName":
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
