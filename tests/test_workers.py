"""Threads that compute alone."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch

from relume.machine.workers import Workers


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("num_tasks", [0, 1, 2, 7])
def test_every_task_runs_once_and_alone_in_its_thread(num_threads: int, num_tasks: int) -> None:
    workers = Workers(num_threads)
    ran: list[tuple[int, int]] = []

    def task(index: int) -> None:
        ran.append((index, torch.get_num_threads()))

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        workers.run([partial(task, index) for index in range(num_tasks)])
        assert sorted(ran) == [(index, 1) for index in range(num_tasks)]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
        workers.close()


def test_the_first_error_is_raised_after_all_tasks_have_ended() -> None:
    others = set(threading.enumerate())
    workers = Workers(2)
    ended: list[int] = []

    def end() -> None:
        ended.append(threading.get_ident())

    def fail() -> None:
        raise ValueError("first")

    with pytest.raises(ValueError, match="first"):
        workers.run([fail, *[end] * 5])
    assert len(ended) == 5
    workers.run([end])
    assert len(ended) == 6
    workers.close()
    assert set(threading.enumerate()) <= others
