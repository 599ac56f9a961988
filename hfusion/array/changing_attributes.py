"""Attributes of members that a training loop sets: capture a few values, then run the members' own code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hfusion.array.variable_states import MAX_VALUES
from hfusion.capture.attribute_fingerprint import modeless_fingerprint

if TYPE_CHECKING:
    from hfusion.array.member_views import Views
    from hfusion.array.module import FusedModule

# Number of calls after which a program is captured again for attributes that have not changed meanwhile: at first, and
# at most. Each such capture doubles it, so that captures cost less than the loops that they save.
_QUIET_CALLS, _MAX_QUIET_CALLS = 8, 512


@dataclass
class AttributeChanges:
    """How often attributes of the members change.

    Attributes:
        changing: why members run their own code now; empty while a program computes them.
        outdated: the members whose attributes are newer than those that programs were captured with.
        states: the number of states of the attributes, beginning with the first.
        quiet: the number of calls since the last change, while members run their own code.
        quiet_calls: the value of ``quiet`` from which on a program is captured again.
    """

    changing: str = ""
    outdated: set[int] = field(default_factory=set)
    states: int = 1
    quiet: int = 0
    quiet_calls: int = _QUIET_CALLS

    def pending(self, calling: bool) -> bool:
        """Return whether `to_capture` has to look, even if no attribute has changed since."""
        return bool(self.changing or (self.outdated and not calling))

    def to_capture(self, views: Views, fused: FusedModule, rows: Sequence[int], calling: bool) -> Mapping[int, Any]:
        """Return the new fingerprints of the members that programs must know from now on, by row.

        Args:
            rows: the members whose attributes may have changed since the last call of this.
            calling: for a call of the array; otherwise, all changes count now.
        """
        names = [views.members[row].take_changed_names() for row in rows]
        is_read = any(map(fused._situations.may_read, names))
        may_wait = calling
        if may_wait and (self.changing or not is_read):
            self.outdated |= set(rows)
            self.quiet = 0 if is_read else self.quiet + 1
            if not self.changing or self.quiet < self.quiet_calls:
                return {}
            self.quiet_calls = min(2 * self.quiet_calls, _MAX_QUIET_CALLS)
        contents: dict[int, Any] = {}
        for row in self.outdated | set(rows):
            member = views.members[row]
            fingerprint = modeless_fingerprint(member.model)
            if member.fingerprint is None:
                member.fingerprint = modeless_fingerprint(fused._member(row))
            if fingerprint != member.fingerprint:
                contents[row] = fingerprint
        if may_wait and not self.changing and contents and _is_new(fused, contents):
            self.states += 1
            if self.states > MAX_VALUES:
                name = min((name for changed in names for name in changed or ()), default="an attribute")
                self._run_own_code(views, fused, name)
                self.outdated = set(contents)
                return {}
        self.outdated, self.changing = set(), ""
        return contents

    def _run_own_code(self, views: Views, fused: FusedModule, name: str) -> None:
        self.changing, self.quiet = f"runs its own code, since {name} changes often", 0
        fused._loops[
            f"{fused._original}: loop over members: {name} of members changes often, and each value needs another "
            "program; give it as an argument of forward, or keep it in a buffer"
        ] = None
        for row in range(len(fused)):
            if row not in views.members:
                views.add(fused, row)


def _is_new(fused: FusedModule, contents: Mapping[int, Any]) -> bool:
    """Return whether there are no programs yet for members with these fingerprints, by row."""
    from hfusion.array.array_editing import Kinds

    after = [contents.get(row, content) for row, content in enumerate(Kinds.of(fused).contents)]
    return tuple(after) not in fused._states
