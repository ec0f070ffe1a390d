"""A pool's actors on a real local Ray."""

from collections.abc import Callable, Iterator

import pytest
import ray

from sdp.config import WorkersConfig
from sdp.errors import SdpError, UserError
from sdp.pool import WorkerPool
from tests.local_ray import one_node


@pytest.fixture(scope="module", autouse=True)
def node() -> Iterator[None]:
    with one_node(cpus=2):
        yield


class Halves:
    """A worker that halves even numbers."""

    def make(self, task: int, _: Callable[[int], None]) -> int:
        if task == 0:
            raise UserError("nothing to halve")
        if task % 2:
            raise ArithmeticError(f"{task} is odd\n(the second line)")
        return task // 2


def halves(*tasks: int) -> list[int]:
    pool = WorkerPool("generate", "generators", WorkersConfig(num_workers=2, accelerator="cpu"))
    pool.join()
    return sorted(pool.run(Halves, tasks))


def test_workers_share_the_tasks() -> None:
    assert halves(2, 4, 6, 8) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("task", "error", "line"),
    [
        (0, UserError, r"^nothing to halve$"),
        (7, SdpError, r"^generate: the generators failed \(ArithmeticError: 7 is odd \(the second line\)\); run the"),
    ],
)
def test_an_error_in_a_worker_ends_the_job_in_one_line(task: int, error: type[SdpError], line: str) -> None:
    with pytest.raises(error, match=line):
        halves(2, task)
    assert ray.is_initialized()
