"""Operations on conversations: say, stop halfway, fork, rewind, save, restore, two at once.

The tokens of every answer are judged against the tokens that were really fed before it.
"""

from pathlib import Path

from mlxrt import ContextOverflow, Session
from mlxrt.engine.session import Reply
from mlxrt.errors import BadLogits, BadSnapshot, WontFit

from . import invariants
from .checker import choose_options
from .stage import Stage

WORDS = ("a", "no", "why?", "aa", "tell me", "é")
MOST = 3  # conversations at once


class ConversationOps(Stage):
    """The part of a machine that talks."""

    def session(self, a: int) -> Session:
        if not self.sessions:
            self.sessions.append(self.engine.session())
        return self.sessions[a % len(self.sessions)]

    def add(self, session: Session) -> None:
        self.sessions.append(session)
        del self.sessions[:-MOST]

    def do_open(self, a: int, *_: int) -> None:
        self.add(self.engine.session("s" if a % 2 else None))

    def ask(self, session: Session, a: int, b: int, mood: int) -> Reply | None:
        before = list(session.turns)
        try:
            form, options = choose_options(mood, seed := a * 64 + b)
            options.pop("stop_token_ids", None)
            return session.say(WORDS[a % len(WORDS)], max_tokens=1 + b % 9, seed=seed, response_format=form, **options)
        except ContextOverflow:
            invariants.require(session.turns == before, "a question that was too long changed the session")
            self.tally["questions too long"] += 1
            return None

    def do_reply(self, a: int, b: int, c: int, d: int) -> None:
        session = self.session(a)
        turns = list(session.turns)
        if (reply := self.ask(session, b, c, d)) is None:
            return
        if b % 5 == 4:
            self.interrupt(session, reply)
        else:
            self.hear(session, reply)
        invariants.require(session.turns[: len(turns)] == turns, "an answer changed what was before it")

    def interrupt(self, session: Session, reply: Reply) -> None:
        """Stop an answer after its first token."""
        seq, turns = self.engine.core.outputs.states[reply._stream.ids[0]].seq, len(session.turns)
        try:
            self.event(reply, seq.id)
        except (WontFit, BadLogits) as error:
            self.give_way(seq, error, held=False)
        reply.close()
        self.trace.append("an answer is stopped after its first token")
        self.checker.check(seq, "an answer stopped halfway")
        self.tally["answers stopped halfway"] += len(session.turns) == turns
        self.tally["answers held to a form stopped halfway"] += seq.request.response_format is not None

    def hear(self, session: Session, reply: Reply) -> bool:
        """Take a full answer and check it; False where it failed."""
        seq = self.engine.core.outputs.states[reply._stream.ids[0]].seq
        try:
            while reply._stream.ids:
                self.event(reply, seq.id)
        except (WontFit, BadLogits) as error:
            self.give_way(seq, error, held=False)
            return False
        said = reply.completion
        invariants.require(session.tokens == tuple(seq.tokens), "a session keeps other tokens than were fed")
        self.trace.append(f"an answer to {len(seq.prompt)} tokens ({said.cached_tokens} cached): {list(said.tokens)}")
        self.checker.check(seq, "an answer")
        self.checker.check_logprobs(seq, list(said.logprobs), "an answer")
        self.tally["answers"] += 1
        self.tally["answers of sessions held to a form"] += seq.request.response_format is not None
        self.tally["answers with cached tokens"] += bool(said.cached_tokens)
        self.prompts.append(session.tokens)
        return True

    def do_duet(self, a: int, b: int, c: int, d: int) -> None:
        """A conversation and its fork are answered at the same time."""
        one = self.session(a)
        two = one.fork()
        pair = [(one, self.ask(one, b, c, d)), (two, self.ask(two, b + 1 + c % 2, d, c))]
        replies = [(s, r) for s, r in pair if r is not None]
        for _ in range(c % 8):
            self.advance()
        for session, reply in replies:
            self.hear(session, reply)
        self.add(two)
        self.tally["forks"] += 1

    def do_fork(self, a: int, *_: int) -> None:
        self.add(self.session(a).fork())
        self.tally["forks"] += 1

    def do_unsay(self, a: int, b: int, *_: int) -> None:
        session = self.session(a)
        n = b % len(session.turns)
        session.rewind(n)
        self.tally["turns rewound"] += n
        self.trace.append(f"{n} turns are rewound")

    def do_save(self, a: int, b: int, *_: int) -> None:
        session, path = self.session(a), self.folder / f"saved-{b % 2}"
        try:
            done = self.refused(lambda: session.save(path) is None)
        except BadSnapshot:
            invariants.require(not session.tokens, "a session that has said something could not be saved")
            self.tally["saves refused: nothing said"] += 1
            return
        if done:
            self.saved[path] = tuple(session.turns)
            self.tally["saves"] += 1
            self.trace.append(f"save {len(session.tokens)} tokens")

    def do_sleep(self, a: int, b: int, *_: int) -> None:
        """A conversation that has said something is put away and woken again."""
        session = self.session(a)
        if not session.tokens and (reply := self.ask(session, 1, 4, 1)) is not None:
            self.hear(session, reply)
        self.do_save(a, b)
        self.do_restore(b)

    def do_restore(self, a: int, *_: int) -> None:
        if self.saved:
            self.restore(sorted(self.saved)[a % len(self.saved)])

    def restore(self, path: Path) -> None:
        session = self.refused(lambda: Session.restore(self.engine, path))
        if session is None:
            return
        invariants.require(tuple(session.turns) == self.saved[path], "a restored session has other turns")
        self.add(session)
        self.tally["restores"] += 1
        self.trace.append(f"restore {len(session.tokens)} tokens")
        reply = self.ask(session, 1, 4, 1)
        if reply is not None and self.hear(session, reply):
            self.tally["restores that were reused"] += bool(reply.completion.cached_tokens)
