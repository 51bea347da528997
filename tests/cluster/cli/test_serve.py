"""Checks of `homing serve` before it starts anything, and its handling of stop signals."""

import signal
import sys
from collections.abc import Iterator
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest

from homing.cluster.cli.serve import StopSignals
from homing.cluster.config import Settings
from homing.cluster.errors import SettingsError
from homing.cluster.preflight import with_files
from homing.router.config import RouterSettings


def settings_with(path: str) -> Settings:
    return msgspec.structs.replace(Settings(), router=RouterSettings(api_keys_file=path))


def test_without_a_keys_file_nothing_changes() -> None:
    """The default needs no file."""
    assert with_files(Settings()) == Settings()


def test_the_keys_file_is_named_by_its_whole_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The router is another process, possibly with another working directory."""
    digest = sha256(b"key").hexdigest()
    (tmp_path / "keys.yaml").write_text(f"keys:\n- key_sha256: '{digest}'\n  tenant: acme\n")
    monkeypatch.chdir(tmp_path)

    assert with_files(settings_with("keys.yaml")).router.api_keys_file == str(tmp_path / "keys.yaml")


def test_a_wrong_keys_file_is_a_setting_s_mistake(tmp_path: Path) -> None:
    """The error names setting and entry, before a minute of loading."""
    path = tmp_path / "keys.yaml"
    path.write_text("keys:\n- tenant: acme\n")

    with pytest.raises(SettingsError, match=r"api_keys_file: .*keys\[0\].*key_sha256"):
        with_files(settings_with(str(path)))


def test_the_store_of_responses_is_named_by_its_whole_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All routers of the machine share the file, whatever their working directory; its folder must exist."""
    monkeypatch.chdir(tmp_path)

    def named(path: str) -> str:
        return with_files(Settings(router=RouterSettings(response_store=path))).router.response_store

    assert (named(""), named("store.db")) == ("", str(tmp_path / "store.db"))
    with pytest.raises(SettingsError, match=r"response_store: folder .* does not exist"):
        named("nowhere/store.db")


def test_the_chat_template_is_named_by_its_whole_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Routers may have another working directory; a wrong path is reported before anything starts."""
    monkeypatch.chdir(tmp_path)
    settings = msgspec.structs.replace(Settings(), router=RouterSettings(chat_template="own.jinja"))
    with pytest.raises(SettingsError, match=r"chat_template: no such file: .*own\.jinja"):
        with_files(settings)
    (tmp_path / "own.jinja").touch()

    assert with_files(settings).router.chat_template == str(tmp_path / "own.jinja")
    assert with_files(Settings()) == Settings()


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
