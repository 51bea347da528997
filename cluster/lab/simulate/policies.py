"""All policies that can be simulated: the router's own, and those of other routers."""

from ....router.routing.policy.base import Policy
from ....router.routing.policy.registry import REGISTRY
from .peers import dynamo, llm_d, plain, sglang, token_load

_PEERS = (dynamo, llm_d, plain, sglang, token_load)
#: By name.
POLICIES: dict[str, type[Policy]] = REGISTRY | {each.name: each for module in _PEERS for each in module.POLICIES}
