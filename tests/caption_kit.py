"""Helpers for tests of the caption stage: configurations, coloured pictures, and a chat server that misbehaves."""

import base64
import io
import json
import threading
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

import numpy as np
from PIL import Image

from sdp.config import load
from sdp.config.caption import CaptionConfig
from tests.tiny_vlm import COLOURS, caption_for, coloured

NAMES = [*COLOURS]


def colour_of(row: int) -> str:
    return NAMES[row % len(NAMES)]


def coloured_png(row: int) -> bytes:
    """The encoded picture of a row."""
    sink = io.BytesIO()
    Image.fromarray(coloured(colour_of(row), row)).save(sink, "PNG")
    return sink.getvalue()


def write_pictures(folder: Path, count: int) -> Path:
    """Write a folder of coloured pictures without captions."""
    folder.mkdir(parents=True)
    for number in range(count):
        (folder / f"{number:03d}.png").write_bytes(coloured_png(number))
    return folder


def caption_config(source: object, output: object, model: object, *settings: str) -> CaptionConfig:
    usual = ["encode.dtype=fp32", "encode.batch_size=4", "output.rows_per_file=20", "captions.max_tokens=24"]
    paths = [f"source.uri={source}", f"output.uri={output}", f"captions.model={model}"]
    return load("caption", None, [*paths, "captions.side=64", *usual, *settings])


class ChatServer:
    """A server of OpenAI's chat API that names the colour of a picture, or does what `behave` returns.

    `behave` gets the colour and the number of this request for it: None answers well; a string of bytes is sent as the
    body; a number is a status; "half" ends in the middle, "lies" promises more bytes than come, "slow" never answers.
    """

    def __init__(
        self, behave: Callable[[str, int], Any] = lambda *_: None, models: tuple[str, ...] = ("tiny",)
    ) -> None:
        self.asked, self.headers, self.prompts = Counter[str](), list[dict[str, str]](), list[str]()
        self.most = 0
        self._now, self._lock, self._behave = 0, threading.Lock(), behave
        self.ending = threading.Event()
        chat = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                self._send(200, json.dumps({"data": [{"id": name} for name in models]}).encode())

            def do_POST(self) -> None:
                chat._answer(self, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def _send(self, status: int, body: bytes, promised: int | None = None, **headers: str) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body) if promised is None else promised))
                for name, value in headers.items():
                    self.send_header(name.replace("_", "-"), value)
                self.end_headers()
                self.wfile.write(body)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ending.set()
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, handler: Any, body: dict[str, Any]) -> None:
        image, text = (part for part in body["messages"][0]["content"])
        data = base64.b64decode(image["image_url"]["url"].partition(",")[2])
        mean = np.asarray(Image.open(io.BytesIO(data))).reshape(-1, 3).mean(axis=0)
        colour = min(COLOURS, key=lambda name: float(np.abs(mean - np.array(COLOURS[name])).sum()))
        with self._lock:
            self.asked[colour] += 1
            number = self.asked[colour]
            self.headers.append(dict(handler.headers))
            self.prompts.append(text["text"])
            self._now += 1
            self.most = max(self.most, self._now)
        try:
            self._do(handler, self._behave(colour, number), colour)
        finally:
            with self._lock:
                self._now -= 1

    def _do(self, handler: Any, what: Any, colour: str) -> None:
        choice = {"finish_reason": "stop", "message": {"role": "assistant", "content": caption_for(colour)}}
        good = json.dumps({"choices": [choice]}).encode()
        if what is None:
            handler._send(200, good)
        elif isinstance(what, int):
            handler._send(what, b"no", Retry_After="0")
        elif isinstance(what, bytes):
            handler._send(200, what)
        elif what == "slow":
            self.ending.wait(60)
        else:
            handler._send(200, good[: len(good) // 2] if what == "half" else good, len(good) + (what == "lies") * 1000)
            handler.close_connection = True
