"""Where Triton leaves the IR of a choice that it cannot compile."""

import os

import pytest

from fl_pallas.kernels.reproducers import VARIABLE, off_the_terminal


def test_nested_and_left_as_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with off_the_terminal():
        with off_the_terminal():
            place = os.environ[VARIABLE]
            assert os.path.isdir(os.path.dirname(place))
        assert os.environ[VARIABLE] == place
    assert VARIABLE not in os.environ
    assert not os.path.exists(os.path.dirname(place))


def test_the_users_place_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "/somewhere")
    with off_the_terminal():
        assert os.environ[VARIABLE] == "/somewhere"
    assert os.environ[VARIABLE] == "/somewhere"
