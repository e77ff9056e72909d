"""One weight used on several inputs at once: its gradient adds those of the uses in their order.

Lanes of multi-token prediction share embedding, norm and head. Autograd would
add the gradients of a leaf that is used several times in an order that is
nobody's promise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import paddle
from paddle.autograd import PyLayer

from pipeproof.stages.paddle.expert_exchange import fork

Tensor: TypeAlias = paddle.Tensor


def used_on_each(
    activations: Sequence[Tensor],
    values_of: Callable[[Sequence[Tensor]], Sequence[Tensor]],
    input_gradient: Callable[[Tensor], Tensor],
    put_off: Callable[[Sequence[Tensor], Sequence[Tensor]], None],
) -> list[Tensor]:
    """``values_of(activations)``, a value of each, which is made with a copy of the weight (``copies``).

    Backward gives each input the ``input_gradient`` of its value's, and
    ``put_off`` the values, on their graph to the weight alone, with all
    gradients.
    """
    return list(_UsedOnEach.apply(values_of, input_gradient, put_off, *activations))


def copies(weight: Tensor, number: int) -> Sequence[Tensor]:
    """A weight for each of several uses, whose gradients are added in their order; one use has the weight itself."""
    return [weight] if number == 1 else fork(weight, number)


class _UsedOnEach(PyLayer):  # type: ignore[misc]  # Paddle ships no types
    """The uses as the layers' graph sees them: functions of the inputs alone."""

    @staticmethod
    def forward(
        ctx: Any,
        values_of: Callable[[Sequence[Tensor]], Sequence[Tensor]],
        input_gradient: Callable[[Tensor], Tensor],
        put_off: Callable[[Sequence[Tensor], Sequence[Tensor]], None],
        *activations: Tensor,
    ) -> tuple[Tensor, ...]:
        with paddle.enable_grad():
            values = values_of([x.detach() for x in activations])
        ctx.values, ctx.input_gradient, ctx.put_off = values, input_gradient, put_off
        return tuple(value.detach() for value in values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        ctx.put_off(ctx.values, gradients)
        return tuple(map(ctx.input_gradient, gradients))
