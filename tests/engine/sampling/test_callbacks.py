"""A row with a Python callback among rows without one."""

import pytest

from mlxrt import Engine, EngineConfig, Request, SamplingParams
from tests.support.oracle import truth
from tests.support.toy_models import make


@pytest.mark.parametrize("ahead", [1, 3])
def test_its_neighbours_stay_in_one_batch_with_it(ahead):
    """Otherwise every second step would be one of another batch, and each would flush the decode tail."""
    model, sizes = make("f"), []
    with Engine(model, EngineConfig(ahead=ahead)) as engine:
        launch = engine.core.runner.launch
        engine.core.runner.launch = lambda step: sizes.append(len(step.slices)) or launch(step)
        params = SamplingParams(max_tokens=12)
        plain, called = engine.generate(
            [
                Request(tokens=(1, 2, 3), params=params),
                Request(tokens=(4, 5), params=params, on_logits=lambda row: row.ban([7])),
            ]
        )
    assert plain.tokens == truth(model, (1, 2, 3), 12) and 7 not in called.tokens
    assert sizes[:12] == [2] * 12
