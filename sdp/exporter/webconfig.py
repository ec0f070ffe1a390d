"""The web configuration file that Prometheus' exporters share: TLS, and users with their passwords' hashes."""

import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sdp.errors import UserError
from sdp.exporter.passwords import COSTS, HASH, Passwords, cost_of

CLIENT_AUTH = {
    "NoClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}
VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}
TLS_KEYS = frozenset({"cert_file", "key_file", "client_ca_file", "client_auth_type", "min_version", "max_version"})


class WebConfigError(UserError):
    """A web configuration that cannot work, in one line."""


@dataclass(frozen=True, slots=True)
class Tls:
    cert_file: Path
    key_file: Path
    client_ca_file: Path | None = None
    client_auth_type: str = "NoClientCert"
    min_version: str = "TLS12"
    max_version: str = "TLS13"


@dataclass(frozen=True, slots=True)
class WebConfig:
    tls: Tls | None = None
    users: Mapping[str, str] = field(default_factory=dict)
    """Name -> bcrypt hash."""
    files: tuple[Path, ...] = ()
    """What it was made of."""


@dataclass(frozen=True, slots=True)
class Security:
    """A web configuration made ready for use."""

    context: ssl.SSLContext | None = None
    passwords: Passwords | None = None
    files: tuple[Path, ...] = ()


def load(path: Path) -> Security:
    """Read the file, and the certificates that it names.

    Raises:
        WebConfigError: One line: which key, what is wrong, what to do.
    """
    import yaml

    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise WebConfigError(f"{path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f":{mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "not text in UTF-8"
        raise WebConfigError(f"{path}{where}: not YAML: {problem}") from error
    try:
        config = parse(raw, path.parent)
        context = make_context(config.tls) if config.tls else None
        passwords = Passwords(config.users) if config.users else None
    except UserError as error:
        raise WebConfigError(f"{path}: {error}") from error
    return Security(context, passwords, (path, *config.files))


def parse(raw: Any, folder: Path) -> WebConfig:
    """Check it; files are relative to its own folder."""
    if raw is None:
        return WebConfig()
    _only(raw, "", frozenset({"tls_server_config", "basic_auth_users"}))
    tls = _parse_tls(raw["tls_server_config"], folder) if raw.get("tls_server_config") is not None else None
    users = raw.get("basic_auth_users")
    if users is None:
        users = {}
    if not isinstance(users, dict):
        raise WebConfigError(f"basic_auth_users: expected a mapping of names to bcrypt hashes, got {_kind(users)}")
    for name, hashed in users.items():
        _check_user(name, hashed)
    files = () if tls is None else (tls.cert_file, tls.key_file, *filter(None, (tls.client_ca_file,)))
    return WebConfig(tls, users, files)


def _parse_tls(raw: Any, folder: Path) -> Tls:
    where = "tls_server_config"
    _only(raw, where, TLS_KEYS)
    for key, value in raw.items():
        if not isinstance(value, str) or not value:
            raise WebConfigError(f"{where}.{key}: expected text, got {_kind(value)}")
    for key in ("cert_file", "key_file"):
        if key not in raw:
            raise WebConfigError(f"{where}.{key}: missing; TLS needs cert_file and key_file")
    for key, choices in (("client_auth_type", CLIENT_AUTH), ("min_version", VERSIONS), ("max_version", VERSIONS)):
        if key in raw and raw[key] not in choices:
            raise WebConfigError(f"{where}.{key}: expected one of {', '.join(choices)}, got {raw[key]!r}")
    asks = raw.get("client_auth_type", "NoClientCert") != "NoClientCert"
    if asks != ("client_ca_file" in raw):
        raise WebConfigError(f"{where}: client_ca_file and a client_auth_type that verifies go together")
    values = {key: folder / value if key.endswith("_file") else value for key, value in raw.items()}
    return Tls(**values)


def _check_user(name: object, hashed: object) -> None:
    if not isinstance(name, str) or not name or ":" in name:
        raise WebConfigError(f"basic_auth_users: {name!r} is no user name; quote it, without a colon in it")
    # Never show what stands there: it may be the password itself.
    if not isinstance(hashed, str) or not HASH.fullmatch(hashed):
        raise WebConfigError(f"basic_auth_users.{name}: not a bcrypt hash; make one with `htpasswd -nBC 10 {name}`")
    if cost_of(hashed) not in COSTS:
        raise WebConfigError(
            f"basic_auth_users.{name}: expected a bcrypt cost of {COSTS[0]} to {COSTS[-1]}, got {cost_of(hashed)}"
        )


def _only(raw: Any, where: str, known: frozenset[str]) -> None:
    if not isinstance(raw, dict):
        raise WebConfigError(f"{where or 'the file'}: expected a mapping, got {_kind(raw)}")
    for key in raw:
        if key not in known:
            dotted = f"{where}.{key}" if where else str(key)
            raise WebConfigError(f"{dotted}: not a key that this exporter has; there are {', '.join(sorted(known))}")


def _kind(value: object) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"


def make_context(tls: Tls) -> ssl.SSLContext:
    """The server's TLS.

    Raises:
        WebConfigError: A file is missing, or holds no certificate or not the certificate's key.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version, context.maximum_version = VERSIONS[tls.min_version], VERSIONS[tls.max_version]
    for path in filter(None, (tls.cert_file, tls.key_file, tls.client_ca_file)):
        try:
            path.read_bytes()
        except OSError as error:
            raise WebConfigError(f"tls_server_config: {path}: {error.strerror}") from error
    try:
        # Refuse to ask at a terminal: a key with a password is an error here.
        context.load_cert_chain(tls.cert_file, tls.key_file, password=lambda: b"")
    except (ssl.SSLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or "not a PEM certificate and its key"
        raise WebConfigError(f"tls_server_config: {tls.cert_file} and {tls.key_file}: {reason}") from error
    if tls.client_ca_file is not None:
        try:
            context.load_verify_locations(tls.client_ca_file)
        except ssl.SSLError as error:
            raise WebConfigError(f"tls_server_config.client_ca_file: {tls.client_ca_file}: {error.reason}") from error
        context.verify_mode = CLIENT_AUTH[tls.client_auth_type]
    return context
