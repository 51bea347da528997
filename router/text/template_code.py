"""Makes Jinja look up keys of plain dicts, and call macros, without calls into its sandbox; the results are the same.

The sandbox's lookups took a third of a short chat's rendering: a missing key costs it two exceptions, as does every
`message.role`. Its checks of a macro take a sixth of one. Imported with the first template, as Jinja is.
"""

from collections.abc import Callable
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.runtime import Context, Macro

#: Names for which Jinja's lookup in a dict may return a method.
_METHODS = frozenset(dir(dict))


class DirectLookups(CodeGenerator):
    """Compiles `message['role']` and `message.role` to a subscription if `message` is a dict at run time."""

    def visit_Getattr(self, node: nodes.Getattr, frame: Frame) -> None:  # noqa: N802 - Jinja's name
        self._look_up(node.node, node.attr, frame)
        super().visit_Getattr(node, frame)
        self.write(")")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:  # noqa: N802 - Jinja's name
        self._look_up(node.node, node.arg.value if isinstance(node.arg, nodes.Const) else None, frame)
        super().visit_Getitem(node, frame)
        self.write(")")

    def _look_up(self, holder: nodes.Node, key: Any, frame: Frame) -> None:
        """Write the lookup in a dict, up to the expression for all other cases, which the caller writes."""
        self.write("(")
        # Only variables: other expressions would be evaluated twice.
        if not isinstance(holder, nodes.Name) or not isinstance(key, str) or key in _METHODS:
            return
        parts = (f"[{key!r}] if {key!r} in ", " else undefined(obj=", f", name={key!r})) if type(", ") is dict else ")
        self.write("(")
        for part in parts:
            self.visit(holder, frame)
            self.write(part)


def direct_calls(call: Callable[..., Any]) -> Callable[..., Any]:
    """A sandbox's `call` that calls a template's own macros without its checks, which macros always pass."""

    def called(context: Context, target: Any, *args: Any, **kwargs: Any) -> Any:
        if type(target) is not Macro:
            return call(context, target, *args, **kwargs)
        kwargs.pop("_loop_vars", None)
        kwargs.pop("_block_vars", None)
        return target(context.eval_ctx, *args, **kwargs)

    return called
