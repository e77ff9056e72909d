"""Time of a dropout mask of the built-in model: by the host, by operations on the GPU, and by one kernel.

    python benchmarks/gpu/mask_draws.py

Microseconds until the mask is on the GPU, medians; the three must have the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.stages.describe.synthetic import DropoutKeys, draw_threshold, mask_key
from pipeproof.stages.torch import device_masks
from pipeproof.stages.torch.mask_kernel import draw_mask
from tests.plans import plan_dict

_SHAPES = (1, 1024, 1024), (1, 4096, 4096), (1, 8, 1024, 1024)
_RATE, _ROUNDS = 0.1, 5


def _us(draw: Callable[[], torch.Tensor]) -> float:
    times = []
    for _ in range(_ROUNDS + 1):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        draw()
        torch.cuda.synchronize()
        times.append(1e6 * (time.perf_counter() - begin))
    return median(times[1:])


def main() -> None:
    """Print the times of each shape."""
    print(torch.cuda.get_device_name(), torch.__version__)
    plan = plan_from_dict(plan_dict()).spec
    state = torch.tensor(device_masks.state_of(mask_key(plan, 0, 0, "layer.0.mlp", "hidden")), device="cuda")
    threshold = device_masks.state_of(draw_threshold(_RATE))[0]
    for shape in _SHAPES:
        ranges = [(0, size) for size in shape[:-1]]
        bounds = [bound for size in shape for bound in (0, size)]

        def on_host(shape: tuple[int, ...] = shape, ranges: list[tuple[int, int]] = ranges) -> torch.Tensor:
            keys = DropoutKeys(plan, 0, 0)
            return torch.as_tensor(keys._kept("hidden", "layer.0.mlp", _RATE, shape, ranges), device="cuda")

        ways: dict[str, Callable[..., torch.Tensor]] = {
            "host": on_host,
            "operations": lambda shape=shape, bounds=bounds: device_masks._kept(state, threshold, shape, bounds),
            "kernel": lambda shape=shape, bounds=bounds: draw_mask(state, threshold, shape, bounds),
        }
        first = on_host()
        times = {name: f"{_us(draw):.0f} us, {'equal' if torch.equal(draw(), first) else 'OTHER'} bits"
                 for name, draw in ways.items()}  # fmt: skip
        print(shape, times)


if __name__ == "__main__":
    main()
