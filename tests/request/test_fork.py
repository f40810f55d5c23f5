"""What a fork of a request has of its parent's is its own from then on."""

from __future__ import annotations

from phasewise.request.request import fork_state


def test_a_forks_state_is_its_own_to_any_depth() -> None:
    state = {"seen": [[1, 2], [3]], "table": {(1, 2): {5: 0.5}}}
    copied = fork_state(state)
    copied["seen"][0].append(9)
    copied["table"][1, 2][6] = 0.25
    assert state == {"seen": [[1, 2], [3]], "table": {(1, 2): {5: 0.5}}}
