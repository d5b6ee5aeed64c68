"""Sequences and views for the sampler's tests."""

import mlx.core as mx
import numpy as np
import pytest

from mlxrt.engine.logits import LogitsView
from mlxrt.engine.request import Request, SamplingParams
from mlxrt.engine.sampler import sample
from mlxrt.engine.sequence import Sequence


def make_sequence(*, prompt=(1,), output=(), seed=0, id=0, on_logits=None, **params) -> Sequence:
    request = Request(tokens=tuple(prompt), params=SamplingParams(**params), on_logits=on_logits)
    seq = Sequence(id, request, tuple(prompt), seed=seed)
    seq.tokens += list(output)
    return seq


def sample_tokens(logits, seqs) -> list[int]:
    with LogitsView(mx.array(np.asarray(logits)), seqs) as view:
        result = sample(view)
        assert result.tokens.dtype == mx.uint32
        assert result.failures() == {}
        return result.tokens.tolist()


@pytest.fixture
def sequence():
    return make_sequence


@pytest.fixture
def tokens_of():
    return sample_tokens
