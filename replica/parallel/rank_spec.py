"""One rank's place among those of its replica: a value that every rank is given at its start."""

from dataclasses import dataclass, field

SECRET_BYTES = 32
#: How long ranks wait for each other, each of which loads the model at its own pace.
JOIN_TIMEOUT_S = 300.0


@dataclass(slots=True, frozen=True, kw_only=True)
class GangSpec:
    """All ranks meet at `host`:`port`, where rank 0 listens."""

    rank: int
    size: int
    host: str
    port: int
    #: SECRET_BYTES that only these ranks were given: nobody else can take part in their plans.
    secret: bytes = field(repr=False)
