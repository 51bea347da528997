"""Checks of `homing serve` before it starts anything, and its handling of stop signals."""

import io
import re
import signal
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from homing.cluster.cli.main import run
from homing.cluster.cli.serve import StopSignals
from homing.cluster.config import Settings, load_settings
from homing.cluster.errors import SettingsError
from homing.cluster.preflight import prepare


def settings_with(**flags: str) -> Settings:
    return load_settings(flags, {})


def test_a_wrong_keys_file_is_a_setting_s_mistake(tmp_path: Path) -> None:
    """The error names setting and entry, before a minute of loading."""
    path = tmp_path / "keys.yaml"
    path.write_text("keys:\n- tenant: acme\n")

    with pytest.raises(SettingsError, match=r"api_keys_file: .*keys\[0\].*key_sha256"):
        prepare(settings_with(api_keys_file=str(path)))


def test_the_folder_of_responses_and_the_chat_template_must_exist(tmp_path: Path) -> None:
    """A wrong path is reported before anything starts."""
    with pytest.raises(SettingsError, match=r"response_store: folder .* does not exist"):
        prepare(settings_with(response_store=str(tmp_path / "nowhere" / "store.db")))
    with pytest.raises(SettingsError, match=r"chat_template: no such file: .*own\.jinja"):
        prepare(settings_with(chat_template=str(tmp_path / "own.jinja")))
    (tmp_path / "own.jinja").touch()

    prepare(settings_with(chat_template=str(tmp_path / "own.jinja"), response_store=str(tmp_path / "store.db")))


def test_a_signal_at_any_moment_asks_for_the_end() -> None:
    """A handler that took a lock held by the main thread would deadlock, and `homing serve` with it."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    kept, traced = {number: signal.getsignal(number) for number in numbers}, sys.gettrace()
    asked: list[str] = []
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores SIGHUP
    try:
        for moment in count(1):
            signals = StopSignals(lambda: asked.append("first"), lambda: asked.append("second"))
            signals.catch()
            moments = count(1)

            def trace(*_: object, at: int = moment, moments: Iterator[int] = moments) -> Any:
                if next(moments) == at:
                    signal.raise_signal(signal.SIGTERM)
                return trace

            sys.settrace(trace)
            stopped = signals.wait(0.0001)
            sys.settrace(traced)
            if next(moments) <= moment:
                break
            assert stopped or signals.wait(0)
            signal.raise_signal(signal.SIGHUP)
            assert (signals.number, asked) == (signal.SIGTERM, ["first", "second"])
            asked.clear()
        assert moment > 3, "the signal did not hit every step of the wait"
    finally:
        sys.settrace(traced)
        for number, handler in kept.items():
            signal.signal(number, handler)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--backend", "ftp://x"], "is not the URL of a server"),
        (["--backend", "http://x", "--events", "tcp://a:1,tcp://b:2"], "2 addresses for 1 backends"),
        (["--backend", "http://x", "--events", "tcp://*:1"], "name its host instead of *"),
        (["--backend", "http://x", "--routers", "2"], "only one router can serve"),
    ],
)
def test_addresses_that_do_not_fit_are_the_users_mistake(words: list[str], message: str) -> None:
    """Invalid addresses are reported before anything starts, with exit code 2."""
    with pytest.raises(SettingsError, match=re.escape(message)) as caught:
        run(["serve", *words], io.StringIO())

    assert caught.value.exit_code == 2
