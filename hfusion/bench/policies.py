"""Policies to compare with: in no case of the sub-benchmark ``schedule`` is one of them the best."""

from __future__ import annotations

from hfusion.schedule.policy import POLICIES, Candidate, Policy, best


def _since(candidate: Candidate) -> float:
    return candidate.since


def random(seed: int) -> Policy:
    """A policy that gives every unit a priority drawn from ``seed``."""

    def drawn(candidate: Candidate) -> float:
        return _mix(_mix(_mix(seed) ^ candidate.task) ^ candidate.unit)

    return Policy("random", "a priority drawn anew for each unit", drawn, best)


def _mix(value: int) -> int:
    """Scatter 64 bits: the finaliser of SplitMix64 (Steele et al., OOPSLA 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return value ^ (value >> 31)


COMPARED: dict[str, Policy] = POLICIES | {
    policy.name: policy
    for policy in (Policy("round-robin", "the task that has waited longest", _since, best), random(0))
}
