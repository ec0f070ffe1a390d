"""Several workers of a process group on this machine, forked from the test: what is imported need not be again."""

import multiprocessing
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch._dynamo  # (every optimizer loads it: once here, rather than in each worker)
import torch.distributed as dist

from sdp.train.world import World

_DEADLINE_S = 120


class WorkersFailed(AssertionError):
    """The errors of the workers that failed."""


def run_workers(count: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Return the result of function(world, *args) in each of `count` workers, by rank; raise the first error."""
    context = multiprocessing.get_context("fork")
    with TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(count):
            here, remote = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(remote, rank, count, folder, function, args), daemon=True)
            process.start()
            remote.close()
            pipes.append(here)
            processes.append(process)
        try:
            answers = [_answer(pipe) for pipe in pipes]
        finally:
            for process in processes:
                process.join(timeout=5)
                process.kill()
    failed = [text for ok, text in answers if not ok]
    if failed:
        raise WorkersFailed(failed)
    return [value for _, value in answers]


def _answer(pipe: Connection) -> tuple[bool, Any]:
    if not pipe.poll(_DEADLINE_S):
        return False, f"no answer within {_DEADLINE_S} s"
    try:
        answer: tuple[bool, Any] = pipe.recv()
    except EOFError:
        return False, "the worker died"
    return answer


def _work(
    pipe: Connection, rank: int, count: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    try:
        store = dist.FileStore(str(Path(folder) / "store"), count)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=timedelta(seconds=60))
        pipe.send((True, function(World(rank, count), *args)))
    except BaseException:  # noqa: BLE001 (told to the test)
        pipe.send((False, f"worker {rank}: {traceback.format_exc()}"))
    finally:
        pipe.close()
        if dist.is_initialized():
            dist.destroy_process_group()
