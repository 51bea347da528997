"""`expected-ttft` without the cache: so that without any overlap both take the same decision."""

from .expected_ttft import ExpectedTtft


class LeastLoaded(ExpectedTtft):
    """Least expected time to first token as if nothing were cached."""

    name = "least-loaded"
    sees_cache = False


POLICIES = (LeastLoaded,)
