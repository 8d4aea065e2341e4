"""Signals: the first is noted where a run can come to an end, every other ends it."""

import os
import signal

import pytest

from ddpm_lab.training import stopping
from ddpm_lab.training.stopping import Stop, Stopped


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_is_noted_and_the_second_ends(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "REPEAT_SECONDS", 0.0)
    before = signal.getsignal(number)
    with Stop() as stop:
        stop.gentle = True
        os.kill(os.getpid(), number)
        assert stop.number == number
        with pytest.raises(Stopped) as caught:
            os.kill(os.getpid(), signal.SIGTERM)
    assert caught.value.number == signal.SIGTERM
    assert signal.getsignal(number) == before


def test_a_signal_before_there_is_anything_to_save_ends_at_once() -> None:
    with pytest.raises(Stopped) as caught, Stop():
        os.kill(os.getpid(), signal.SIGINT)
    assert caught.value.number == signal.SIGINT
    assert not isinstance(caught.value, Exception), "no handler of errors may swallow it"


def test_a_signal_that_is_passed_on_is_one_signal() -> None:
    """A scheduler tells every process of a job, and torchrun tells its own once more."""
    with Stop() as stop:
        stop.gentle = True
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
        assert stop.number == signal.SIGTERM
        with pytest.raises(Stopped):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_signal_that_is_passed_on_does_not_break_into_what_the_first_has_begun_to_end() -> None:
    with Stop():
        with pytest.raises(Stopped):
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Stopped):
            os.kill(os.getpid(), signal.SIGINT)
