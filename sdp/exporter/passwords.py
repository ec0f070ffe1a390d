"""Checks passwords against bcrypt hashes, by the C library's own crypt: Python has no bcrypt."""

import ctypes
import hashlib
import hmac
import re
import secrets
import threading
from collections.abc import Mapping

from sdp.errors import UserError

_LIBRARIES = ("libcrypt.so.1", "libcrypt.so.2", None)
"""libxcrypt of Debian and Ubuntu, of Fedora and its kin; None is the C library itself (musl)."""
_CRYPT_DATA = 1 << 18
"""Room for crypt_r's working data, whose size differs; the largest known is 131,232 bytes."""
HASH = re.compile(r"\$2[aby]\$(\d\d)\$[./A-Za-z0-9]{53}")
COSTS = range(4, 16)
"""Each step doubles the time; 15 takes about two seconds a check."""
_KNOWN = ("$2b$04$abcdefghijklmnopqrstuu", "")


class NoBcrypt(UserError):
    """The C library has no bcrypt."""

    def __init__(self) -> None:
        super().__init__(
            "basic_auth_users: this system cannot check bcrypt hashes (libcrypt.so.1 is missing, or too old);"
            " install libcrypt1, or leave basic_auth_users out"
        )


class Passwords:
    """The users, and whether a password is theirs. A right one is remembered: a check costs 50 ms and more."""

    def __init__(self, users: Mapping[str, str]) -> None:
        self._users = dict(users)
        self._bcrypt = Bcrypt()
        # Checked where there is no such user, so that the time taken does not tell.
        self._nobody = max(self._users.values(), key=cost_of)
        self._secret = secrets.token_bytes(32)
        self._right: dict[str, bytes] = {}
        self._one_at_a_time = threading.Lock()

    def check(self, user: str, password: str) -> bool:
        hashed = self._users.get(user)
        against = hashed or self._nobody
        digest = hashlib.blake2b("\0".join((against, password)).encode(), key=self._secret).digest()
        if hmac.compare_digest(self._right.get(user, b""), digest):
            return True
        with self._one_at_a_time:  # guessing must not take all cores
            right = self._bcrypt.matches(password, against) and hashed is not None
        if right:
            self._right[user] = digest
        return right


def cost_of(hashed: str) -> int:
    found = HASH.fullmatch(hashed)
    return int(found[1]) if found else 0


class Bcrypt:
    """crypt_r of the system's library."""

    def __init__(self) -> None:
        for name in _LIBRARIES:
            try:
                function = ctypes.CDLL(name).crypt_r
            except (OSError, AttributeError):
                continue
            function.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p)
            function.restype = ctypes.c_char_p
            self._crypt_r = function
            if self.hash("", _KNOWN[0]).startswith(_KNOWN[0]):
                return
        raise NoBcrypt

    def hash(self, password: str, setting: str) -> str:
        """Empty, or beginning with *, where the library knows no such hash."""
        room = ctypes.create_string_buffer(_CRYPT_DATA)
        found = self._crypt_r(password.encode(), setting.encode(), room)
        return (found or b"").decode("ascii", "replace")

    def matches(self, password: str, hashed: str) -> bool:
        if "\0" in password:  # C would take what comes before it for the password
            return False
        return hmac.compare_digest(self.hash(password, hashed), hashed)
