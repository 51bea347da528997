"""Tenants' shares in the queue: bounded unfairness, no starvation, and the promised order within a tenant."""

from collections import Counter
from hashlib import sha256
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from homing.router.flow.fair_queue import MAX_OWN_LANES, TRIES, FairQueue, _Lane

WEIGHTS = {b"ann": 1.0, b"bob": 2.0, b"eve": 0.5}
MOST = 100.0
work = st.floats(1, MOST)


def push(
    queue: FairQueue,
    name: int,
    tenant: bytes,
    priority: int = 0,
    own_order: int = 0,
    rank: float = 0.0,
    group: str = "",
) -> None:
    weight = WEIGHTS.get(tenant, 1.0)
    queue.push(name, priority=priority, tenant=tenant, weight=weight, rank=(own_order, rank), group=group)


def take(queue: FairQueue, cost: float) -> None:
    """Take the request whose turn it is."""
    name = queue.head()
    assert name is not None
    queue.take(name, cost)


@given(st.lists(work, min_size=60, max_size=60), st.integers(1, 59))
def test_what_waiting_tenants_get_differs_by_a_request_of_each(works: list[float], since: int) -> None:
    """Work divided by weight differs by at most one request of each, in any interval and at any cost per request."""
    queue = FairQueue()
    tenant_of = {}
    for at in range(180):
        tenant_of[at] = sorted(WEIGHTS)[at % 3]
        push(queue, at, tenant_of[at])
    served: Counter[bytes] = Counter()
    for at, cost in enumerate(works):
        name = queue.head()
        assert name is not None
        take(queue, cost)
        if at >= since:
            served[tenant_of[name]] += cost / WEIGHTS[tenant_of[name]]

    for one, weight in WEIGHTS.items():
        for other, others in WEIGHTS.items():
            assert served[one] - served[other] <= MOST / weight + MOST / others + 1e-6


@given(st.integers(0, 300), st.lists(work, min_size=1, max_size=40), st.integers(1, 5))
def test_a_newcomer_waits_for_one_request_of_each_other_tenant(before: int, works: list[float], others: int) -> None:
    """This holds however many requests the others have queued, and however long they have been served."""
    queue = FairQueue()
    for at in range(1000):
        push(queue, at, b"flood%d" % (at % others))
    for at in range(before):
        take(queue, works[at % len(works)])
    push(queue, 5000, b"newcomer")

    ahead = 0
    while queue.head() != 5000:
        take(queue, works[ahead % len(works)])
        ahead += 1
    assert ahead <= others


def test_a_tenants_own_order_does_not_move_it_before_others() -> None:
    """Three hundred urgent requests must not delay the requests of other tenants."""
    queue = FairQueue()
    for at in range(300):
        push(queue, at, b"flood", own_order=-1)
    push(queue, 900, b"other")
    push(queue, 901, b"flood", own_order=-2)

    order = []
    while (head := queue.head()) is not None:
        order.append(head)
        take(queue, 1.0)
    assert order.index(900) <= 1
    assert order.index(901) <= 1
    assert [name for name in order if name < 300] == list(range(300))


def test_a_tenant_s_requests_go_by_rank_and_never_before_another_tenant_s_turn() -> None:
    """A short request passes its own tenant's long ones; two tenants still take turns."""
    queue = FairQueue()
    for name, (tenant, rank) in enumerate([(b"ann", 9.0), (b"ann", 1.0), (b"bob", 5.0), (b"ann", 1.0), (b"bob", 2.0)]):
        push(queue, name, tenant, rank=rank)
    queue.check()

    order = []
    while (name := queue.head()) is not None:
        order.append(name)
        take(queue, 1.0)
    assert [name for name in order if name in (0, 1, 3)] == [1, 3, 0]
    assert [name for name in order if name in (2, 4)] == [4, 2]
    assert sorted(order[:2]) == [1, 4]


def test_who_idled_has_saved_nothing_up() -> None:
    """An idle tenant saves up no credit: ann was away while bob was served, and is not owed that time."""
    queue = FairQueue()
    for name in range(100):
        push(queue, name, b"bob")
    push(queue, 1000, b"ann")
    for _ in range(50):
        take(queue, 10.0)
    for name in range(1001, 1010):
        push(queue, name, b"ann")

    order = []
    for _ in range(8):
        order.append("ann" if (queue.head() or 0) >= 1000 else "bob")
        take(queue, 10.0)
    assert order.count("bob") >= 4


def test_requests_that_were_withdrawn_cost_nothing() -> None:
    """Withdrawn requests must not count against their tenant's share."""
    queue = FairQueue()
    for name in range(100):
        push(queue, name, b"ann")
    push(queue, 100, b"bob")
    for name in range(99):
        queue.discard(name)
    push(queue, 101, b"bob")

    assert queue.head() == 99


def test_work_that_shows_later_is_charged() -> None:
    """The length of an answer is not known in advance."""
    queue = FairQueue()
    for name in range(10):
        push(queue, name, (b"x", b"y")[name % 2])
    take(queue, 1.0)
    queue.charge(priority=0, tenant=b"x", work=3.0)

    order = []
    for _ in range(5):
        order.append((queue.head() or 0) % 2)
        take(queue, 1.0)
    assert order == [1, 1, 1, 1, 0]


def test_endless_newcomers_neither_starve_others_nor_fill_the_memory() -> None:
    """Without a keys file any API key is a tenant, and each new one starts level with the tenant served last."""
    queue = FairQueue()
    for name in range(100):
        push(queue, name, b"regular")
    served = 0
    for name in range(1000, 10_000):
        push(queue, name, sha256(b"%d" % name).digest())
        served += (queue.head() or 0) < 100
        take(queue, 1.0)

    assert queue.lanes <= MAX_OWN_LANES + 256
    assert served > 1


def test_tenants_that_share_a_lane_are_charged_and_give_way_like_one() -> None:
    """With more tenants than lanes, tenants in a shared lane get no free work and no more places than one tenant."""
    queue = FairQueue()
    for name in range(MAX_OWN_LANES):
        push(queue, name, sha256(b"%d" % name).digest())
    first, second, third = (b"\x00shared" + end for end in (b"1", b"2", b"3"))
    for name in range(5000, 5004):
        push(queue, name, (first, second)[name % 2])
    queue.check()

    assert queue.crowded_out_by(sha256(b"0").digest()) == 5003
    assert queue.crowded_out_by(third) is None
    queue.charge(priority=0, tenant=first, work=2.0)
    order = []
    while (name := queue.head()) is not None:
        order.append(name)
        take(queue, 1.0)
    assert order[-4:] == [5000, 5001, 5002, 5003]


def test_a_round_in_which_nothing_fits_does_not_look_at_every_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each report and each end of a request causes a round."""
    queue, looked = FairQueue(), Counter[bytes]()
    for at in range(900):
        push(queue, at, b"tenant%d" % (at % 300), priority=at % 3)
    first = _Lane.first
    monkeypatch.setattr(_Lane, "first", lambda lane, shut: looked.update([lane.tenant]) or first(lane, shut))

    for name in queue.turns():
        queue.let_pass(name, inf)

    assert looked.total() <= 2 * TRIES


def test_a_request_that_fits_nowhere_lets_others_pass_up_to_its_own_work() -> None:
    """Without passing, one odd request stops all others; without a bound, small ones keep a large one out for good."""
    queue = FairQueue()
    push(queue, 1, b"ann")
    push(queue, 2, b"ann", priority=1)
    for name in range(3, 20):
        push(queue, name, b"bob", priority=2)

    taken = []
    for _ in range(5):
        for name in queue.turns():
            if name > 2:
                taken.append(name)
                queue.take(name, 10.0)
            else:
                queue.let_pass(name, (0.0, 35.0, 45.0)[name])
        queue.check()

    assert taken == [3, 4, 5, 6]
    queue.take(1, 50.0)
    queue.let_pass(2, inf)
    assert list(queue.turns())[:2] == [2, 7], "what waits for something else holds nobody up"


def test_a_round_has_few_tries_and_keeps_the_order() -> None:
    """Each try is a decision. A request that fits nowhere must not lose its turn, nor gain one over other tenants."""
    queue = FairQueue()
    for name in range(9):
        push(queue, name, (b"ann", b"bob", b"eve")[name % 3])

    assert len(list(queue.turns())) == TRIES
    assert list(queue.turns()) == list(queue.turns())
    assert sorted(queue.turns(inf)) == list(range(9))
    queue.check()


@settings(max_examples=30)
@given(data=st.data(), count=st.integers(1, 40))
def test_a_round_reaches_every_group_that_is_not_shut(data: st.DataObject, count: int) -> None:
    """Requests that no replica can take for now must not stop those that another one could take."""
    queue, group_of = FairQueue(), dict[int, str]()
    for name in range(count):
        group_of[name] = data.draw(st.sampled_from("abc"))
        tenant = data.draw(st.sampled_from(sorted(WEIGHTS)))
        if data.draw(st.booleans()):
            push(queue, name, tenant, priority=data.draw(st.integers(0, 1)), group=group_of[name])
        else:
            queue.resume(name, priority=data.draw(st.integers(0, 1)), group=group_of[name])
    passed = data.draw(st.sampled_from((0.0, 5.0, inf)))
    for _ in range(3):
        tried = Counter[str]()
        for name in queue.turns(shut=["a"], keep=lambda group: [group]):
            tried[group_of[name]] += 1
            if group_of[name] == "b":
                queue.let_pass(name, passed)
            else:
                queue.take(name, 3.0)
                del group_of[name]
        queue.check()

        waiting = Counter(group_of.values())
        assert not waiting["c"], "all were taken"
        assert not tried["a"], "their group was shut"
        assert bool(tried["b"]) == bool(waiting["b"])
        assert tried["b"] <= TRIES
        assert set(queue.groups) == set(waiting)


def test_a_tenant_that_cannot_be_served_gets_no_credit() -> None:
    """It starts level with the others when it can, as an idle one does."""
    queue = FairQueue()
    for name in range(10):
        push(queue, name, b"ann", group="gone")
    for name in range(10, 40):
        push(queue, name, b"carl")
    for name in queue.turns(shut=["gone"]):
        if name == 30:
            break
        queue.take(name, 1.0)

    order = []
    while len(order) < 8:
        order.append((queue.head() or 0) < 10)
        take(queue, 1.0)

    assert sum(order) in (4, 5)
    queue.check()


class FairQueueMachine(RuleBasedStateMachine):
    """Compared with a list: by priority, resumed requests first, each tenant in its own order; nothing is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = FairQueue()
        #: Priority, whether in a lane (otherwise resumed), tenant, name, own order.
        self.waiting: list[tuple[int, bool, bytes, int, int]] = []
        self.names = 0

    @rule(tenant=st.sampled_from(sorted(WEIGHTS)), priority=st.integers(-1, 1), own_order=st.integers(-1, 1))
    def push(self, tenant, priority, own_order):
        push(self.queue, self.names, tenant, priority, own_order)
        self.waiting.append((priority, True, tenant, self.names, own_order))
        self.names += 1

    @rule(priority=st.integers(-1, 1))
    def resume(self, priority):
        self.queue.resume(self.names, priority=priority)
        self.waiting.append((priority, False, b"", self.names, 0))
        self.names += 1

    @precondition(lambda self: self.waiting)
    @rule(cost=work)
    def take(self, cost):
        head = self.queue.head()
        take(self.queue, cost)
        self.waiting = [entry for entry in self.waiting if entry[3] != head]

    @precondition(lambda self: self.waiting)
    @rule()
    def try_all(self):
        """Nothing is tried twice in one round, and nothing waits behind what fits nowhere."""
        seen = []
        for name in self.queue.turns():
            seen.append(name)
            self.queue.let_pass(name, inf)
        assert len(seen) == len(set(seen)) == min(len(self.waiting), TRIES)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def discard(self, data):
        name = data.draw(st.sampled_from([entry[3] for entry in self.waiting]))
        self.queue.discard(name)
        self.queue.discard(name)
        self.waiting = [entry for entry in self.waiting if entry[3] != name]

    @rule(tenant=st.sampled_from(sorted(WEIGHTS)), priority=st.integers(-1, 1), cost=work)
    def charge(self, tenant, priority, cost):
        self.queue.charge(priority=priority, tenant=tenant, work=cost)

    @invariant()
    def the_head_is_a_right_one(self):
        self.queue.check()
        assert len(self.queue) == len(self.waiting)
        if not self.waiting:
            assert self.queue.head() is None
            return
        best = min(entry[:2] for entry in self.waiting)
        first_of_each: dict[bytes, tuple[int, int]] = {}
        for priority, in_lane, tenant, name, own_order in self.waiting:
            if (priority, in_lane) == best:
                first_of_each[tenant] = min(first_of_each.get(tenant, (9, 0)), (own_order, name))
        assert self.queue.head() in [name for _, name in first_of_each.values()]

    @invariant()
    def who_gives_way_has_the_most_waiting(self):
        count = Counter(tenant for _, in_lane, tenant, _, _ in self.waiting if in_lane)
        victim = self.queue.crowded_out_by(b"new")
        if not count or max(count.values()) < 2:
            assert victim is None
            return
        tenant = next(tenant for _, _, tenant, name, _ in self.waiting if name == victim)
        assert count[tenant] == max(count.values())
        mine = [(each[0], each[4], each[3]) for each in self.waiting if each[1] and each[2] == tenant]
        assert victim == max(mine)[2]


TestFairQueue = FairQueueMachine.TestCase
TestFairQueue.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
