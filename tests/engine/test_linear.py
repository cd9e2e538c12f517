"""The engine's linear layer computes what `nn.Linear` does, for any number of rows."""

from __future__ import annotations

import pytest
import torch

from upswing.engine.linear import MAX_ROWS, FewRowsLinear, speed_up_linears


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (2, 5), (1, MAX_ROWS), (1, MAX_ROWS + 1)])
def test_equals_the_plain_layer(shape: tuple[int, int], bias: bool) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(16, 24, bias=bias)
    input = torch.randn(*shape, 16)
    expected = layer(input)
    speed_up_linears(layer)
    assert type(layer) is FewRowsLinear
    torch.testing.assert_close(layer(input), expected)
    assert layer(input).is_contiguous()


def test_other_number_formats_are_left_alone() -> None:
    layer = torch.nn.Linear(4, 4).to(torch.bfloat16)
    speed_up_linears(layer)
    assert type(layer) is torch.nn.Linear
