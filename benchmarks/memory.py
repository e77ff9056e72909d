"""Distance of the memory counted for GPT blocks from the memory that PyTorch allocates on a real GPU.

``python benchmarks/memory.py measure FILE`` runs forwards and backwards of a stage of blocks in bfloat16 with PyTorch
on the GPU at hand (no pipeproof needed there) and writes FILE; ``python benchmarks/memory.py compare FILE`` prints what
was allocated next to the prediction. Norm and SwiGLU keep the tensors of fused kernels; attention is flash attention.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

SIZES = {
    "8B-like, 4 blocks": {"hidden": 4096, "heads": 32, "ffn": 14336, "seq": 8192, "blocks": 4},
    "2B-like, 8 blocks": {"hidden": 2048, "heads": 16, "ffn": 8192, "seq": 4096, "blocks": 8},
}
HELD = 3
"""Micro-batches that are forwarded before the first backward, as the second of four ranks of 1F1B does."""


def measure() -> dict[str, Any]:
    """Bytes allocated, by sizes."""
    import torch

    _stage(torch, hidden=256, heads=2, ffn=512, seq=256, blocks=1)  # libraries take their workspaces
    found = {name: _stage(torch, **sizes) for name, sizes in SIZES.items()}
    return {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "bytes": found}


def _stage(torch: Any, *, hidden: int, heads: int, ffn: int, seq: int, blocks: int) -> dict[str, int]:
    """Memory of a micro-batch in addition to weights and gradients: after its forward, and at the peak.

    ``allocated`` and ``reserved`` are peaks of the whole process, without the remains of earlier stages in the
    allocator.
    """
    norm, swiglu = _fused(torch)
    shapes = ((hidden,), (hidden, 3 * hidden), (hidden, hidden), (hidden,), (hidden, 2 * ffn), (ffn, hidden))
    cos, sin = torch.rand(2, seq, 1, 1, hidden // heads // 2, dtype=torch.bfloat16, device="cuda")

    def weight(*shape: int) -> Any:
        made = torch.randn(*shape, dtype=torch.bfloat16, device="cuda").mul_(0.02).requires_grad_()
        made.grad = torch.zeros_like(made)
        return made

    def turned(part: Any) -> Any:
        first, second = part.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)

    def block(x: Any, weights: Any) -> Any:
        norm1, qkv, out, norm2, gate_up, down = weights
        parts = (norm.apply(x, norm1) @ qkv).view(seq, 1, heads, -1).chunk(3, dim=-1)
        # a view would keep the whole of the fused product
        q, k, v = (part.permute(1, 2, 0, 3) for part in (turned(parts[0]), turned(parts[1]), parts[2].clone()))
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        middle = x + mixed.permute(2, 0, 1, 3).reshape(seq, 1, hidden) @ out
        gate, up = (norm.apply(middle, norm2) @ gate_up).chunk(2, dim=-1)
        return middle + swiglu.apply(gate, up) @ down

    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    begin = torch.cuda.memory_allocated()
    stage = [[weight(*shape) for shape in shapes] for _ in range(blocks)]
    states = torch.cuda.memory_allocated()
    flights = []
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        for _ in range(HELD):
            flights.append(torch.randn(seq, 1, hidden, dtype=torch.bfloat16, device="cuda").requires_grad_())
            y = flights[-1]
            for weights in stage:
                y = block(y, weights)
            flights[-1] = y
            del y
        forward = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        while flights:
            y = flights.pop(0)
            y.backward(torch.ones_like(y))
            del y
    return {
        "states": states - begin,
        "micro_batch": (forward - states) // HELD,
        "most": torch.cuda.max_memory_allocated() - begin,
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
    }


def _fused(torch: Any) -> tuple[Any, Any]:
    """RMSNorm and SwiGLU that keep the tensors of fused kernels."""

    class Norm(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any) -> Any:
            factor = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)
            ctx.save_for_backward(x, factor, weight)
            return (x * factor * weight).to(x.dtype)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            x, factor, weight = ctx.saved_tensors
            plain = (x * factor).to(x.dtype)
            scaled = grad * weight
            inner = (scaled - plain * (scaled * plain).mean(-1, keepdim=True)) * factor
            return inner.to(x.dtype), (grad * plain).sum((0, 1))

    class SwiGlu(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, gate: Any, up: Any) -> Any:
            ctx.save_for_backward(gate, up)
            return torch.nn.functional.silu(gate) * up

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            gate, up = ctx.saved_tensors
            sigmoid = torch.sigmoid(gate)
            return grad * up * sigmoid * (1 + gate * (1 - sigmoid)), grad * gate * sigmoid

    return Norm, SwiGlu


def compare(measured: dict[str, Any]) -> None:
    """Print the allocated memory and the prediction, in MiB."""
    from pipeproof import lower, simulate
    from pipeproof.sim.step_memory import stage_holdings
    from pipeproof.specs.load_plan import plan_from_dict
    from pipeproof.stages.describe.stage_memory import state_of

    sys.stdout.write(f"{measured['gpu']}, PyTorch {measured['torch']}; MiB\n")
    for name, sizes in SIZES.items():
        spec = plan_from_dict(_plan(**sizes)).spec
        lowered = lower(spec)
        state = state_of(spec, lowered.layers_of(1))
        held = stage_holdings(lowered, 1)
        output = 2 * sizes["seq"] * sizes["hidden"]
        curve = simulate(lowered).memory[1]
        rows = {
            "states": state.parameters + state.gradients,
            "micro_batch": int(sum(one.num_bytes for one in held if one.lifetime.is_from_forward)) + output,
            "most": curve.peak,
        }
        sys.stdout.write(f"\n{name:<20} {'allocated':>9} {'predicted':>9}  ratio\n")
        for key, predicted in rows.items():
            actual = measured["bytes"][name][key]
            line = f"{actual / 2**20:9.1f} {predicted / 2**20:9.1f}  {predicted / actual:.3f}"
            sys.stdout.write(f"{key.replace('_', '-'):<20} {line}\n")
        fragmentation = measured["bytes"][name]["reserved"] / measured["bytes"][name]["allocated"] - 1
        sys.stdout.write(f"fragmentation        {fragmentation:.1%}\n")


def _plan(hidden: int, heads: int, ffn: int, seq: int, blocks: int) -> dict[str, Any]:
    """Four stages; the second has only blocks and holds ``HELD`` micro-batches."""
    layers = [f"layer.{i}" for i in range(4 * blocks)]
    cut = [layers[i * blocks : (i + 1) * blocks] for i in range(4)]
    return {
        "pipeproof": 1,
        "model": {
            "kind": "gpt", "num_layers": 4 * blocks, "hidden_size": hidden, "num_heads": heads, "ffn_size": ffn,
            "vocab_size": 64, "seq_length": seq,
        },
        "topology": {"pp": 4},
        "schedule": {"kind": "1f1b", "num_micro_batches": 8, "micro_batch_size": 1},
        "stages": [["embed", *cut[0]], *cut[1:3], [*cut[3], "norm", "head"]],
        "memory": {"dtype": "bfloat16", "gradient_dtype": "bfloat16", "optimizer_bytes": 0},
    }  # fmt: skip


def main() -> None:
    """Measure on a GPU, or compare a measurement with the prediction."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=["measure", "compare"])
    parser.add_argument("file", type=Path)
    arguments = parser.parse_args()
    if arguments.what == "measure":
        arguments.file.write_text(json.dumps(measure(), indent=1) + "\n", encoding="utf-8")
    else:
        compare(json.loads(arguments.file.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
