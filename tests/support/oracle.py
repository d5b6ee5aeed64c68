"""The truth to compare with: a dense forward that has no memory at all, computed anew for every token."""

import mlx.core as mx

from mlxrt.cache.memory import Shared


class Dense:
    """One sequence, everything at once, plain masks."""

    def __init__(self, spec, n):
        self.spec, self.positions = spec, mx.arange(n)

    def attend(self, q, k=None, v=None, *, scale, softcap=None, sinks=None):
        assert softcap is None and sinks is None, "the oracle's models have neither"
        if k is not None:
            codec = self.spec.codec
            coded = [x[:, :, None] for x in codec.encode(k, v)]  # [N, heads, 1, width]
            self.k, self.v = (x[:, :, 0] for x in codec.decode(coded))
        groups = q.shape[1] // self.k.shape[1]
        k, v = (mx.repeat(x, groups, axis=1).swapaxes(0, 1) for x in (self.k, self.v))
        at, far = self.positions[:, None], self.positions[None]
        seen = (far <= at) & ((far > at - (self.spec.window or 1 << 30)) | (far < self.spec.keep))
        scores = mx.where(seen, (q.swapaxes(0, 1) * scale) @ k.swapaxes(1, 2), -mx.inf)
        return (mx.softmax(scores, axis=-1) @ v).swapaxes(0, 1)

    def scan(self, cell, *xs):
        parts = tuple(mx.zeros((1, *shape), dtype) for shape, dtype in self.spec.parts)
        return cell(parts, *(x[None] for x in xs))[1][0]


def logits(model, tokens):
    specs = model.cache_specs()
    views = [None if isinstance(s, Shared) else Dense(s, len(tokens)) for s in specs]
    views = [views[s.layer] if isinstance(s, Shared) else view for s, view in zip(specs, views)]
    return model.logits(model(mx.array(list(tokens)), views))


def truth(model, prompt, n, guess=()):
    """n greedy tokens. One forward confirms as much of a guess as is right; the rest takes a forward for each token."""
    tokens, guess = list(prompt), list(guess[:n])
    if guess:
        best = mx.argmax(logits(model, [*prompt, *guess[:-1]])[len(prompt) - 1 :], axis=-1).tolist()
        wrong = [i for i, (token, right) in enumerate(zip(guess, best, strict=True)) if token != right]
        tokens += guess[: wrong[0]] if wrong else guess
    while len(tokens) < len(prompt) + n:
        tokens.append(mx.argmax(logits(model, tokens)[-1]).item())
    return tuple(tokens[len(prompt) :])


def common_prefix(a, b) -> int:
    """How many tokens two rows begin with alike."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def next_prefix(tokenizer, messages) -> int:
    """How many tokens the next prompt of a conversation begins with, whatever is asked."""
    one, other = (tokenizer.chat([*messages, {"role": "user", "content": text}]) for text in ("x", "9"))
    return common_prefix(one, other)


def truths(model, prompts, n, answers):
    """The truth for each prompt, with the answer to it as the guess."""
    return [truth(model, prompt, n, answer) for prompt, answer in zip(prompts, answers, strict=True)]
