"""A registry of images on 127.0.0.1, as far as one asks whether an image is there: open, with tokens or a login."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal, Self

Asks = Literal["nothing", "token", "login", "other token"]


class Registry:
    """Knows a set of images, each REPOSITORY:TAG, and asks whoever comes for something, or for nothing."""

    def __init__(self, images: set[str], asks: Asks = "nothing") -> None:
        self.requests: list[str] = []
        registry = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                return

            def do_GET(self) -> None:
                registry.requests.append(f"GET {self.path}")
                content = json.dumps({"token": "for-anybody"}).encode()
                self.send_response(200 if self.path.startswith("/token?") else 404)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def do_HEAD(self) -> None:
                registry.requests.append(f"HEAD {self.path}")
                challenge = {
                    "token": f'Bearer realm="http://{registry.host}/token",service="images",scope="repository:x:pull"',
                    "other token": f'Bearer realm="http://{registry.host}/token",service="images"',
                    "login": 'Basic realm="images"',
                }.get(asks)
                let_in = asks == "nothing" or (
                    asks == "token" and self.headers["Authorization"] == "Bearer for-anybody"
                )
                repository, _, reference = self.path.removeprefix("/v2/").partition("/manifests/")
                known = f"{repository}:{reference}" in images and "oci.image.index" in self.headers["Accept"]
                self.send_response((200 if known else 404) if let_in else 401)
                if challenge and not let_in:
                    self.send_header("WWW-Authenticate", challenge)
                self.send_header("Content-Length", "0")
                self.end_headers()

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.host = f"127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=lambda: self._server.serve_forever(0.05), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
