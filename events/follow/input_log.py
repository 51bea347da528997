"""The last inputs of a pure state machine, so that an error in production can be replayed.

A state machine that owns an `InputLog` decorates its public methods with `logged`. It must not call them itself: then
the kept calls, made again in the same order on a machine in the same state, lead to the same error.
"""

from collections.abc import Callable
from functools import update_wrapper
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

#: Inputs that a log keeps at most.
MOST = 1000
#: An input counts once for each so many bytes: a thousand inputs hold at most 4 MB.
COUNTED_BYTES = 4096

#: A method's name and its arguments.
Input = tuple[str, tuple[Any, ...], dict[str, Any]]


class InputLog:
    """The last 500 to 1000 inputs, fewer if they are long: the present half and the one before it."""

    __slots__ = ("_before", "_describe", "_half", "_middle", "_start", "left", "on_error", "recent")

    def __init__(self, most: int = MOST) -> None:
        self._half = max(1, most // 2)
        self._before: list[Input] = []
        self._start: object = None  #: the state before the first kept input
        self._middle: object = None  #: the state before the present half
        self._describe: Callable[[], object] = lambda: None
        #: Inputs of the present half, and the count that is left for it. `logged` changes them.
        self.recent: list[Input] = []
        self.left = self._half
        #: Called with the log, the method's name and its error.
        self.on_error: Callable[[InputLog, str, Exception], None] | None = None

    def begin(self, describe: Callable[[], object]) -> None:
        """Describe the machine's state, as far as a replay needs it, by this: now and once per half."""
        self._describe = describe
        self._start = self._middle = describe()

    def turn(self) -> None:
        """The present half is full: begin another one."""
        self._before, self.recent, self.left = self.recent, [], self._half
        self._start, self._middle = self._middle, self._describe()

    def failed(self, name: str, error: Exception) -> None:
        """The method ended with this error. Must not raise, as the error is on its way."""
        if self.on_error is not None:
            self.on_error(self, name, error)

    def kept(self) -> tuple[object, list[Input]]:
        """What `describe` returned before the first kept input, and the kept inputs, oldest first."""
        return self._start, [*self._before, *self.recent]


class Logged(Protocol):
    """A state machine with a log."""

    inputs: InputLog


Machine = TypeVar("Machine", bound=Logged)
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def logged(
    size: Callable[[tuple[Any, ...]], int] | None = None,
    keep: Callable[[tuple[Any, ...]], tuple[Any, ...]] | None = None,
) -> Callable[[Callable[Concatenate[Machine, Arguments], Result]], Callable[Concatenate[Machine, Arguments], Result]]:
    """Keep the calls of a method. `size`: the memory of its positional arguments, if they may be long.

    `keep`: the positional arguments without what a replay does not need and would hold memory.
    """

    def decorate(
        method: Callable[Concatenate[Machine, Arguments], Result],
    ) -> Callable[Concatenate[Machine, Arguments], Result]:
        name = method.__name__

        def call(self: Machine, /, *args: Arguments.args, **named: Arguments.kwargs) -> Result:
            inputs = self.inputs
            if inputs.left <= 0:
                inputs.turn()
            inputs.recent.append((name, args if keep is None else keep(args), named))
            inputs.left -= 1 if size is None else 1 + size(args) // COUNTED_BYTES
            try:
                return method(self, *args, **named)
            except Exception as error:
                inputs.failed(name, error)
                raise

        update_wrapper(call, method)
        return call

    return decorate
