"""Settings of the whole process that several threads need at times."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from fl_pallas.config import config
from fl_pallas.kernels.chosen import CHOSEN, as_chosen
from fl_pallas.meanwhile import Meanwhile


def test_entered_by_the_first_and_left_by_the_last() -> None:
    happened: list[str] = []

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        happened.append("entered")
        yield
        happened.append("left")

    shared = Meanwhile(context)
    first, second = threading.Event(), threading.Event()

    def outer() -> None:
        with shared:
            first.set()
            assert second.wait(60)
        happened.append("first is done")

    def inner() -> None:
        assert first.wait(60)
        with shared:
            second.set()
            done.result(60)

    with ThreadPoolExecutor(2) as threads:
        done = threads.submit(outer)
        threads.submit(inner).result(60)
    assert happened == ["entered", "first is done", "left"]
    with shared:
        pass
    assert happened[3:] == ["entered", "left"]


def test_left_where_it_is_raised_in() -> None:
    happened: list[str] = []
    stack = contextlib.ExitStack()
    stack.callback(happened.append, "left")
    with pytest.raises(ZeroDivisionError), Meanwhile(lambda: stack):
        _ = 1 / 0
    assert happened == ["left"]


def test_triton_keeps_its_files_here_until_the_last_thread_is_done(
    tmp_path: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    knobs = pytest.importorskip("triton", reason="kernels are compiled by the package triton").knobs
    monkeypatch.setattr(config, "cache", str(tmp_path))
    monkeypatch.setitem(CHOSEN, "TRITON_CACHE_DIR", None)
    before = knobs.cache.dir
    one, other = as_chosen(), as_chosen()
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert knobs.cache.dir.startswith(str(tmp_path))
    other.__exit__(None, None, None)
    assert knobs.cache.dir == before
