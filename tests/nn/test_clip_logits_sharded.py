"""`massieu.nn.clip_logits` of weights that lie on several processes: bit for bit what one process does."""

import pytest
from tests.support.nn.clipping_work import shard_and_clip
from tests.support.processes import run


@pytest.mark.slow
def test_sharded_weights_are_scaled_as_whole_ones():
    assert run(shard_and_clip, 2) == [6 * [[]]] * 2
