"""A random program as plain data: how the engine is set up, then operations of a name and four small numbers.

What a number means is the machine's business (always modulo what is there), so every program is valid and hypothesis
can shrink any of them.
"""

from dataclasses import dataclass

from hypothesis import strategies as st

from .kinds import KINDS

Op = tuple[str, int, int, int, int]

# Names more than once come more often. The first is what hypothesis shrinks to: the one that does least.
OPS = (
    "drop",
    *["submit"] * 7,
    *["step"] * 7,
    *["cancel", "finish"] * 2,
    *["hold", "feed", "rewind", "rewind", "put", "freeze", "score"],
    *["hold", "feed"],
    *["evict"] * 2,
    *["clear", "open", "fork", "unsay", "save", "restore", "sleep", "duet", "reboot"],
    *["reply"] * 3,
)


@dataclass(frozen=True)
class Program:
    kind: str
    ahead: int
    chunk: int
    capacity: int  # tokens that fit, all together
    running: int
    compiled: bool
    ops: tuple[Op, ...]

    def __str__(self) -> str:
        head = f"{self.kind}: ahead {self.ahead}, chunk {self.chunk}, {self.capacity} tokens fit, {self.running} run"
        return "\n".join([head + (", compiled" if self.compiled else ""), *(f"  {op!r}" for op in self.ops)])


small = st.integers(0, 63)


def programs(*kinds: str, longest: int = 36) -> st.SearchStrategy[Program]:
    return st.builds(
        Program,
        kind=st.sampled_from(kinds or KINDS),
        ahead=st.integers(0, 3),
        chunk=st.one_of(st.sampled_from([5, 16, 64]), st.integers(1, 64)),
        capacity=st.sampled_from([72, 96, 144, 1200]),
        running=st.integers(1, 4),
        compiled=st.sampled_from([False] * 15 + [True]),
        ops=st.lists(st.tuples(st.sampled_from(OPS), small, small, small, small), min_size=10, max_size=longest).map(
            tuple
        ),
    )
