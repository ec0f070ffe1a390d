"""Helpers for tests of the caption stage: configurations, coloured pictures, and a chat server that misbehaves."""

import base64
import io
import json
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
from PIL import Image

from sdp.config import load
from sdp.config.caption import CaptionConfig
from tests.storage_server import RESET, Answer, Request, Server
from tests.tiny_vlm import COLOURS, caption_for, coloured

NAMES = [*COLOURS]


def colour_of(row: int) -> str:
    return NAMES[row % len(NAMES)]


def coloured_png(row: int) -> bytes:
    """The encoded picture of a row."""
    sink = io.BytesIO()
    Image.fromarray(coloured(colour_of(row), row)).save(sink, "PNG")
    return sink.getvalue()


def nearest_colour(picture: Image.Image) -> str:
    """The colour of a picture, by its mean."""
    mean = np.asarray(picture).reshape(-1, 3).mean(axis=0)
    return min(COLOURS, key=lambda name: float(np.abs(mean - np.array(COLOURS[name])).sum()))


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
        self.asked, self.headers, self.prompts = Counter[str](), list[Mapping[str, str]](), list[str]()
        self.most = 0
        self._now, self._lock, self._behave = 0, threading.Lock(), behave
        self._models, self._ending = models, threading.Event()
        self._server = Server(self._answer)
        self.url = f"{self._server.address}/v1"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._server.close()

    def _answer(self, request: Request) -> Answer:
        if request.method == "GET":
            return Answer(200, json.dumps({"data": [{"id": name} for name in self._models]}).encode())
        image, text = (part for part in json.loads(request.body)["messages"][0]["content"])
        data = base64.b64decode(image["image_url"]["url"].partition(",")[2])
        colour = nearest_colour(Image.open(io.BytesIO(data)))
        with self._lock:
            self.asked[colour] += 1
            number = self.asked[colour]
            self.headers.append(request.headers)
            self.prompts.append(text["text"])
            self._now += 1
            self.most = max(self.most, self._now)
        try:
            return self._done(self._behave(colour, number), colour)
        finally:
            with self._lock:
                self._now -= 1

    def _done(self, what: Any, colour: str) -> Answer:
        choice = {"finish_reason": "stop", "message": {"role": "assistant", "content": caption_for(colour)}}
        good = json.dumps({"choices": [choice]}).encode()
        if isinstance(what, int):
            return Answer(what, b"no", {"Retry-After": "0"})
        if isinstance(what, bytes):
            return Answer(200, what)
        if what == "slow":
            self._ending.wait(60)
            return RESET
        if what is None:
            return Answer(200, good)
        promised = {"half": len(good), "lies": len(good) + 1000}[what]
        body = good[: len(good) // 2] if what == "half" else good
        return Answer(200, body, {"Content-Length": str(promised), "Connection": "close"})
