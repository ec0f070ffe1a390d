"""Web configurations that cannot work are one line each, and passwords are checked as others check them."""

import json
import ssl
from pathlib import Path

import pytest

from sdp.exporter import webconfig
from sdp.exporter.passwords import Bcrypt, Passwords
from sdp.exporter.webconfig import WebConfigError
from tests.exporter_kit import HASH, PASSWORD, certificate, web_config

VECTORS = [
    # Of crypt_blowfish, from which all others took them.
    ("U*U", "$2a$05$CCCCCCCCCCCCCCCCCCCCC.E5YPO9kmyuRGyh0XouQYb4YMJKvyOeW"),
    ("U*U*", "$2a$05$CCCCCCCCCCCCCCCCCCCCC.VGOzA784oUp/Z0DY336zx7pLYAy0lwK"),
    ("U*U*U", "$2a$05$XXXXXXXXXXXXXXXXXXXXXOAcXxm9kjPGEMsLznoKqmqw7tc8WCx4a"),
    ("", "$2a$05$CCCCCCCCCCCCCCCCCCCCC.7uG0VCzI2bS7j6ymqJi9CdcdxiRTWNy"),
]


@pytest.mark.parametrize(("password", "hashed"), VECTORS)
def test_bcrypt_agrees_with_the_published_vectors(password: str, hashed: str) -> None:
    bcrypt = Bcrypt()
    assert bcrypt.matches(password, hashed)
    assert not bcrypt.matches(password + "x", hashed)
    assert not bcrypt.matches(password, hashed[:-1] + ("a" if hashed[-1] != "a" else "b"))


def test_2y_and_2b_are_the_same_as_2a_for_such_passwords() -> None:
    assert all(Bcrypt().matches(PASSWORD, f"$2{letter}{HASH[3:]}") for letter in "aby")


def test_a_nul_byte_does_not_end_a_password() -> None:
    assert not Bcrypt().matches(PASSWORD + "\0anything", HASH)


def test_a_user_is_known_by_name_and_password_and_a_right_one_is_remembered() -> None:
    passwords = Passwords({"ann": HASH, "bob": VECTORS[1][1]})
    asked = 0
    real = passwords._bcrypt.matches

    def counting(password: str, hashed: str) -> bool:
        nonlocal asked
        asked += 1
        return real(password, hashed)

    passwords._bcrypt.matches = counting  # type: ignore[method-assign]
    assert [passwords.check("ann", PASSWORD) for _ in range(5)] == [True] * 5
    assert asked == 1
    assert not passwords.check("ann", "U*U*")
    assert not passwords.check("bob", PASSWORD)
    assert passwords.check("bob", "U*U*")
    assert asked == 4
    assert not passwords.check("eve", PASSWORD)
    assert asked == 5  # of somebody who is not there: as slow as of somebody who is
    assert passwords.check("ann", PASSWORD)
    assert asked == 5


def written(folder: Path, text: str) -> Path:
    path = folder / "web.yml"
    path.write_text(text)
    return path


BAD = {
    "not YAML": ("a: [1", "web.yml:1: not YAML"),
    "not a mapping": ("- 1", "the file: expected a mapping, got a list"),
    "an unknown key": ("tls_config: {}", "tls_config: not a key that this exporter has"),
    "rate limits": ("rate_limit: {burst: 2}", "rate_limit: not a key that this exporter has"),
    "an unknown key of TLS": (
        "tls_server_config: {cert_file: a, key_file: b, curve_preferences: [X]}",
        "tls_server_config.curve_preferences: not a key",
    ),
    "no key file": ("tls_server_config: {cert_file: a.crt}", "tls_server_config.key_file: missing"),
    "a number for a file": (
        "tls_server_config: {cert_file: 3, key_file: k}",
        "tls_server_config.cert_file: expected text",
    ),
    "a file that is not there": (
        "tls_server_config: {cert_file: no.crt, key_file: no.key}",
        "no.crt: No such file or directory",
    ),
    "a file that is no certificate": (
        "tls_server_config: {cert_file: web.yml, key_file: web.yml}",
        "web.yml and ",
    ),
    "a key of another certificate": (
        "tls_server_config: {cert_file: exporter.crt, key_file: other.key}",
        "KEY_VALUES_MISMATCH",
    ),
    "an insecure way to ask clients": (
        "tls_server_config: {cert_file: exporter.crt, key_file: exporter.key, client_auth_type: RequireAnyClientCert}",
        "client_auth_type: expected one of NoClientCert, VerifyClientCertIfGiven, RequireAndVerifyClientCert",
    ),
    "clients' certificates without who signs them": (
        "tls_server_config: {cert_file: exporter.crt, key_file: exporter.key,"
        " client_auth_type: RequireAndVerifyClientCert}",
        "client_ca_file and a client_auth_type that verifies go together",
    ),
    "who signs without asking": (
        "tls_server_config: {cert_file: exporter.crt, key_file: exporter.key, client_ca_file: exporter.crt}",
        "client_ca_file and a client_auth_type that verifies go together",
    ),
    "an old TLS": (
        "tls_server_config: {cert_file: exporter.crt, key_file: exporter.key, min_version: TLS10}",
        "min_version: expected one of TLS12, TLS13",
    ),
    "users as a list": ("basic_auth_users: [ann]", "basic_auth_users: expected a mapping"),
    "a password in place of its hash": ("basic_auth_users: {ann: hunter2}", "basic_auth_users.ann: not a bcrypt hash"),
    "a user without anything": ("basic_auth_users: {ann: }", "basic_auth_users.ann: not a bcrypt hash"),
    "a user with a colon": (f"basic_auth_users: {{'a:b': '{HASH}'}}", "'a:b' is no user name"),
    "a cost that takes minutes": (
        f"basic_auth_users: {{ann: '{HASH.replace('$05$', '$31$')}'}}",
        "expected a bcrypt cost of 4 to 15, got 31",
    ),
}


@pytest.mark.parametrize(("text", "message"), BAD.values(), ids=BAD)
def test_what_cannot_work_is_one_line_that_names_the_key(tmp_path: Path, text: str, message: str) -> None:
    certificate(tmp_path)
    certificate(tmp_path, "other")
    path = written(tmp_path, text)
    with pytest.raises(WebConfigError) as caught:
        webconfig.load(path)
    line = str(caught.value)
    assert line.startswith(str(path))
    assert message in line
    assert "\n" not in line
    assert "hunter2" not in line


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(WebConfigError, match=r"web\.yml: No such file or directory$"):
        webconfig.load(tmp_path / "web.yml")


def test_an_empty_file_asks_for_nothing(tmp_path: Path) -> None:
    security = webconfig.load(written(tmp_path, ""))
    assert (security.context, security.passwords) == (None, None)


def test_files_are_looked_for_beside_the_configuration(tmp_path: Path) -> None:
    security = webconfig.load(web_config(tmp_path))
    assert security.context is not None
    assert security.context.minimum_version is ssl.TLSVersion.TLSv1_2
    assert security.context.verify_mode is ssl.CERT_NONE
    assert security.passwords is not None
    assert security.files == (tmp_path / "web.yml", tmp_path / "exporter.crt", tmp_path / "exporter.key")


def test_clients_are_asked_for_certificates_where_it_says_so(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    tls = {"cert_file": str(cert), "key_file": str(key), "client_ca_file": str(cert), "min_version": "TLS13"}
    text = json.dumps({"tls_server_config": {**tls, "client_auth_type": "RequireAndVerifyClientCert"}})
    context = webconfig.load(written(tmp_path, text)).context
    assert context is not None
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.minimum_version is ssl.TLSVersion.TLSv1_3
