"""Pins, quotas and admission together: pinned prefixes stay, limits hold, and a refusal changes
nothing.
"""

from __future__ import annotations

from hypothesis import HealthCheck
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from prefix.computed import text
from prefix.lives import BLOCK, SPECS, Keeper
from thorough import tried

from mlx_blockpool.errors import PoolExhaustedError
from mlx_blockpool.prefix.cache import Acquired, pin_of
from mlx_blockpool.prefix.retention import RetentionPolicy
from mlx_blockpool.prefix.trie import PinnedPrefix

BLOCKS = 14
SYSTEMS = [text(1, 256), text(2, 400), text(3, 520)]
PROMPTS = [
    [*system, *text(10 * n + tail, 300 * tail)]
    for n, system in enumerate(SYSTEMS, 1)
    for tail in (1, 2)
]
prompts, ends = st.sampled_from(PROMPTS), st.sampled_from([100, 256, 512, 1000])
owners = st.sampled_from([RetentionPolicy("a"), RetentionPolicy("b"), RetentionPolicy()])


@tried(25, 300, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
class RetentionMachine(RuleBasedStateMachine):
    """A pool of 14 blocks, a quota of 3 blocks for each named agent, and at most half of the
    pool pinned.
    """

    @initialize(name=st.sampled_from(["full", "window", "hybrid"]))
    def start(self, name: str) -> None:
        self.keeper = Keeper(SPECS[name], BLOCKS, state_bytes=16 * 88, agent_bytes=3 * BLOCK)
        self.live: list[tuple[Acquired, list[int], RetentionPolicy]] = []
        self.held: list[PinnedPrefix] = []
        self.scripted: list[list[int]] = []

    @property
    def pins(self) -> list[PinnedPrefix]:
        return [*self.keeper.pins, *self.held]

    @rule(prompt=prompts, policy=owners, room=st.sampled_from([1, 700, 1400]))
    def acquire(self, prompt: list[int], policy: RetentionPolicy, room: int) -> None:
        before = [pin.name for pin in self.keeper.pins]
        counts = [group.held for group in self.keeper.prefix.pool.counts()]
        try:
            found = self.keeper.prefix.acquire(prompt, room)
        except PoolExhaustedError:
            assert [pin.name for pin in self.keeper.pins] == before, "a refusal unpins nothing"
            assert [group.held for group in self.keeper.prefix.pool.counts()] == counts, (
                "a refusal holds nothing"
            )
            return
        self.live.append((found, prompt, policy))

    @rule(prompt=prompts, policy=owners, end=ends, seconds=st.sampled_from([0.0, 300.0, 3600.0]))
    def ask(self, prompt: list[int], policy: RetentionPolicy, end: int, seconds: float) -> None:
        before = len(self.live)
        self.acquire(prompt, policy, 1)
        if len(self.live) > before:
            self.end(-1, (end, seconds) if seconds else None)

    @precondition(lambda self: self.live)
    @rule(
        at=st.integers(0, 3), pinned=st.none() | st.tuples(ends, st.sampled_from([300.0, 3600.0]))
    )
    def end(self, at: int, pinned: tuple[int, float] | None) -> None:
        found, prompt, policy = self.live.pop(at % len(self.live))
        pins = [] if pinned is None else [pinned]
        self.keeper.compute(found, prompt, policy, [end for end, _ in pins])
        self.keeper.end(found, prompt, pins, policy)
        charged = self.keeper.agents
        if not self.live and not self.pins and not self.scripted and set(charged) == {policy.owner}:
            limit = self.keeper.prefix.retention.quotas.limit(policy.owner)
            assert (limit is None) == (policy.agent is None)
            assert limit is None or charged[policy.owner] <= limit, (
                "nothing else needs what is over the quota"
            )

    @rule(seconds=st.sampled_from([1.0, 400.0]))
    def wait(self, seconds: float) -> None:
        self.keeper.wait(seconds)
        assert all(pin.until > self.keeper.now for pin in self.keeper.pins)

    @rule(prompt=prompts, policy=owners, end=ends)
    def hold(self, prompt: list[int], policy: RetentionPolicy, end: int) -> None:
        self.ask(prompt, policy, end, 0.0)
        prefix, pins = self.keeper.prefix, self.keeper.pins
        pin = pin_of(prefix.arena, prefix.match(prompt[:end]))
        before = prefix.index.pinned_bytes(self.held)
        after = prefix.index.pinned_bytes([*self.held, pin])
        fits = after[0] <= pins.most_bytes and after[1] <= pins.most_state_bytes
        assert pins.hold(pin) is fits
        if fits:
            self.held.append(pin)
        assert prefix.index.pinned_bytes(self.held) == (after if fits else before)

    @precondition(lambda self: self.held)
    @rule(at=st.integers(0, 9))
    def unpin(self, at: int) -> None:
        self.keeper.pins.unpin(self.held.pop(at % len(self.held)))

    @rule(prompt=prompts, end=ends)
    def script_pins(self, prompt: list[int], end: int) -> None:
        if len(self.scripted) < 2:
            self.keeper.prefix.pin(prompt[:end])
            self.scripted.append(prompt[:end])

    @precondition(lambda self: self.scripted)
    @rule()
    def script_unpins(self) -> None:
        self.keeper.prefix.unpin(self.scripted.pop())

    @rule(n_bytes=st.sampled_from([0, 5 * BLOCK]))
    def trim(self, n_bytes: int) -> None:
        self.keeper.prefix.trim_to(n_bytes)

    @invariant()
    def limits_hold_and_what_is_pinned_stays(self) -> None:
        if not hasattr(self, "keeper"):
            return
        self.keeper.check()
        for pin in self.pins:
            assert all(node.in_memory and not node.removed for node in pin.nodes), (
                "an edge of what is pinned has gone"
            )
            assert pin.node is None or pin.position in pin.node.latest.checkpoints, (
                "its checkpoint has gone"
            )

    def teardown(self) -> None:
        if not hasattr(self, "keeper"):
            return
        for found, _, _ in self.live:
            self.keeper.prefix.discard(found.caches)
        for pin in self.held:
            self.keeper.pins.unpin(pin)
        while self.scripted:
            self.script_unpins()
        self.keeper.wait(1e6)
        self.keeper.prefix.trim_to(0)
        assert (len(self.keeper.pins), self.keeper.prefix.nbytes) == (0, 0), (
            "nothing is held or pinned any more"
        )


TestRetentionMachine = RetentionMachine.TestCase
