"""Plans are values: the same seed gives the same questions in the same order."""

from itertools import islice

from .plan import make_plan, strikes


def test_a_seed_gives_the_same_plan_again() -> None:
    """A failure must be reproducible from its seed."""
    assert make_plan(7) == make_plan(7)
    assert make_plan(7) != make_plan(8)


def test_there_are_streams_and_plain_requests_and_greedy_and_drawn_answers() -> None:
    """Every fault must be tested with each kind of request."""
    plan = make_plan(1)

    assert {client.streamed for client in plan.clients} == {True, False}
    assert {question.temperature for question in plan.questions} == {0.0, 1.0}
    assert len({question.prompt for question in plan.questions}) == len(plan.questions)


def test_every_client_asks_every_question_in_an_order_of_its_own() -> None:
    """Requests with a common prefix overlap, but the clients do not ask in lockstep."""
    plan = make_plan(1)
    numbers = sorted(question.number for question in plan.questions)

    assert all(sorted(client.questions) == numbers for client in plan.clients)
    assert len({client.questions for client in plan.clients}) == len(plan.clients)


def test_all_faults_strike_before_one_strikes_again() -> None:
    """No fault may be left out by chance."""
    names = ["a", "b", "c"]
    drawn = list(islice(strikes(3, names), 9))

    assert [sorted(strike.fault for strike in drawn[at : at + 3]) for at in (0, 3, 6)] == [names] * 3
    assert drawn == list(islice(strikes(3, names), 9))
    assert all(0 <= strike.draw < 1 for strike in drawn)


def test_without_faults_nothing_strikes() -> None:
    """An empty list of faults must not loop for ever."""
    assert list(strikes(1, [])) == []
