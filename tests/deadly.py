"""A prompt and a picture that kill the process that works on them."""

import os
import signal
from typing import Any

DEADLY = "<kill the worker>"
"""A prompt, or what stands behind a picture's end: a process that obeys dies of it."""


def obey() -> None:
    """Make this process obey: a worker, as it starts, or a driver that works itself."""
    from sdp.evaluate.worker import Evaluator
    from sdp.generate.worker import GenerateStages

    draw, decode = GenerateStages.work, Evaluator._decode

    def drawn(self: Any, worker: Any, value: Any) -> Any:
        if any(prompt == DEADLY for _, prompt in value):
            os.kill(os.getpid(), signal.SIGKILL)
        return draw(self, worker, value)

    def decoded(self: Any, spec: Any, data: Any) -> Any:
        if bytes(data).endswith(DEADLY.encode()):
            os.kill(os.getpid(), signal.SIGKILL)
        return decode(self, spec, data)

    GenerateStages.work, Evaluator._decode = drawn, decoded  # type: ignore[method-assign]
