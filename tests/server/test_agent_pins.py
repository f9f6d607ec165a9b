"""What agents are pinned with leaves room for requests, in models with blocks, with states, and
with both.
"""

from __future__ import annotations

import pytest
from prefix.lives import STATED as SPECS
from prefix.lives import Life

from mlx_blockpool.server.served_agents import ServedAgents
from mlx_blockpool.tier.path_facts import PathFacts

PROMPTS = [list(range(100 * n, 100 * n + 40)) for n in range(1, 13)]


def pinned(life: Life) -> tuple[ServedAgents, list[bool]]:
    """All prompts are answered and pinned, each under a name of its own, as far as they may be."""
    agents = ServedAgents("m", None)
    agents.attend(PathFacts(life.prefix))
    for n, prompt in enumerate(PROMPTS):
        life.answer(prompt)
        agents.pin(f"agent {n}", life.prefix.index.trie.match(prompt).detached())
    agents.close(60)
    return agents, list(agents.pinned.values())


@pytest.mark.parametrize("name", SPECS)
def test_pinned_agents_leave_half_of_the_states_to_requests(name: str) -> None:
    own = SPECS[name].fixed_bytes_per_agent()
    life = Life(SPECS[name], state_bytes=10 * own)
    agents, found = pinned(life)
    assert found == [True] * 5 + [False] * 7
    assert sum(agents.pinned.values()) == 5
    new = list(range(3000, 3040))
    assert life.answer(new) == 0
    assert life.answer([*new, 1, 2]) == len(new)
    assert life.answer([*PROMPTS[0], 1, 2]) == len(PROMPTS[0])


def test_a_refused_pin_holds_once_another_has_gone() -> None:
    life = Life(
        SPECS["states alone"], state_bytes=4 * SPECS["states alone"].fixed_bytes_per_agent()
    )
    agents, found = pinned(life)
    assert found == [True, True] + [False] * 10
    agents.unpin("agent 0")
    life.answer(PROMPTS[11])
    agents.pin("agent 11", life.prefix.index.trie.match(PROMPTS[11]).detached())
    assert agents.pinned["agent 11"]
