"""Bounds of request fields, declared with the field's type: what the largest legal value is, or what it costs.

msgspec enforces ranges and lengths. It cannot bound the size of free JSON, so `check_sizes` does that for all bodies,
by the declarations. `/openapi.json` shows both kinds, and a test finds fields that declare neither a bound nor a cost.
"""

from functools import cache
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from ...errors import InvalidRequest

Value = TypeVar("Value")

#: Keys of the schema under which the declarations are found.
SIZE_KEY, COST_KEY = "x-max-bytes", "x-cost"
#: Free JSON that is kept small. Shorter bodies are not measured, as no field can be larger than its body.
SMALL_BYTES = 64 * 1024
#: The definitions of tools, and the schemas and grammars that answers must match.
DEFINITION_BYTES = 1024 * 1024

#: What the size of a field costs, where the cost is bounded. `prompt`: it is rendered and tokenized in threads, in
#: turns among tenants, and the model's context and the tenant's limits bound the tokens. `decoding`: nothing reads it,
#: and `body_cost` bounds the decoding of a body.
Cost = Literal["prompt", "decoding"]


def at_most(size: int) -> Meta:
    """The field's JSON has at most this many bytes."""
    return Meta(extra_json_schema={SIZE_KEY: size})


def costs(cost: Cost) -> Meta:
    """The field may have any size, and this bounds what that costs."""
    return Meta(extra_json_schema={COST_KEY: cost})


#: Any value of a field that nothing reads, or of which little is read.
Unread = Annotated[Any, at_most(SMALL_BYTES)]
#: The same inside of a message, where it is not measured.
OnlyDecoded = Annotated[Any, costs("decoding")]
#: A part of the prompt.
Rendered = Annotated[Value, costs("prompt")]
Messages = Annotated[list[Value], Meta(min_length=1), costs("prompt")]
#: A schema, a grammar or a list of choices that the answer must match.
Definition = Annotated[Value, at_most(DEFINITION_BYTES)]
Tools = Definition[list[dict[str, Any]]]
TemplateArguments = Annotated[dict[str, Any], at_most(SMALL_BYTES)]
#: A number of tokens.
TokenCount = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**32 - 1)]
#: The name of a model, a session, a kind of something.
Name = Annotated[str, Meta(max_length=1024)]
Seconds = Annotated[float, Meta(gt=0, le=1e9)]


def check_sizes(data: bytes, kind: type) -> bool:
    """Check the sizes of the fields in a body of this type, in a third of a millisecond per megabyte.

    Returns whether that was necessary. A body that is not a JSON object passes. Raises InvalidRequest.
    """
    if not _sizes(kind) or len(data) <= SMALL_BYTES:
        return False
    _check_fields(data, kind, "")
    return True


def _check_fields(data: bytes | msgspec.Raw, kind: type, where: str) -> None:
    limits = _sizes(kind)
    try:
        fields = _FIELDS.decode(data)
    except (ValueError, RecursionError):
        return
    for name, raw in fields.items():
        limit = limits.get(name)
        if isinstance(limit, type):
            _check_fields(raw, limit, f"{where}{name}.")
        elif limit is not None and len(raw) > limit:
            raise InvalidRequest.field(where + name, f"has {len(raw):,} bytes of JSON; the maximum is {limit:,}")


_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


@cache
def _sizes(kind: type) -> dict[str, int | type]:
    """The maximum size of each field that has one, by name; or its type, if that has such fields."""
    described = msgspec.inspect.type_info(kind)
    assert isinstance(described, msgspec.inspect.StructType), kind
    return {each.encode_name: size for each in described.fields if (size := _size(each.type)) is not None}


def _size(described: msgspec.inspect.Type) -> int | type | None:
    match described:
        case msgspec.inspect.StructType(cls=kind):
            return kind if _sizes(kind) else None
        case msgspec.inspect.Metadata(type=inner, extra_json_schema=extra):
            return (extra or {}).get(SIZE_KEY) or _size(inner)
        case msgspec.inspect.UnionType(types=types):
            return next((size for size in map(_size, types) if size is not None), None)
    return None
