"""The ports and topic at which other projects' indexers find the events."""

import pytest

from homing.events.config import EventsSettings
from homing.events.publish.fixed_stream import LAST_PORT, Publisher, fixed_stream, settings_problem


def test_ports_end_with_the_last_one() -> None:
    """ZeroMQ would bind port 65,536 as port 0."""
    stream = fixed_stream(
        EventsSettings(events_port=LAST_PORT - 3, events_replay_port=LAST_PORT - 1), Publisher(1, "h")
    )

    assert stream is not None
    assert list(stream.places()) == [(LAST_PORT - 3, LAST_PORT - 1), (LAST_PORT - 2, LAST_PORT)]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"events_replay_port": 5558}, "events_replay_port"),
        ({"events_topic": "kv@{model}"}, "events_topic"),
        ({"events_port": 5557, "events_replay_port": 5557}, "events_replay_port"),
        ({"events_preset": "llm-d", "events_replay_port": 5557}, "events_replay_port"),
    ],
)
def test_settings_without_effect_are_named(given: dict[str, int | str], named: str) -> None:
    """A port that nothing listens on would be found only by its subscriber."""
    problem = settings_problem(EventsSettings(**given))

    assert problem is not None
    assert problem.startswith(named)


@pytest.mark.parametrize("given", [{}, {"events_preset": "dynamo"}, {"events_port": 5557, "events_topic": "kv"}])
def test_other_settings_are_right(given: dict[str, int | str]) -> None:
    assert settings_problem(EventsSettings(**given)) is None
