"""Times of single kernels at the sizes of ``new_shapes.py``, on a GPU under load. Only PyTorch is needed.

    python benchmarks/gpu/shape_kernels.py OUT.jsonl

Products of F, I and W (W with and without the addition to a gradient of either type), losses as three programs compute
them, attention, memory-bound operations, products of experts, and launches by the host. Each line of the result has the
microseconds of one call, with 50 ms of calls one right after the other, on a GPU that was busy before. A part that
fails, or that begins after its time, is a line with the reason. About 2 minutes.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

SECONDS = 170
"""Time after which no part begins."""
BATCH_MS = 50.0
SHAPES = (
    # name, tokens, hidden, queries + keys + values, inner size, vocabulary, heads, heads of keys
    ("3072", 4096, 3072, 5120, 8192, 32000, 24, 8),
    ("6144", 2048, 6144, 18432, 24576, 16000, 48, 48),
    ("1536", 8192, 1536, 4608, 6144, 50304, 12, 12),
    ("2048", 4096, 2048, 6144, 1024, 32000, 16, 16),
    ("4096", 4096, 4096, 12288, 16384, 4096, 32, 32),
)
EXPERTS = ((32, 4, 2048, 1024), (64, 8, 2048, 768), (8, 2, 4096, 4096))
"""Experts, experts of a token, hidden and inner size; 4,096 tokens."""
WIDE = ((4096, 32000), (2048, 16000), (8192, 50304), (4096, 4096), (4096, 128256))
"""Tokens and vocabulary."""


def made(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = False) -> Tensor:
    """Random numbers: a GPU draws less power over zeros."""
    return (torch.randn(*shape, device="cuda") * 0.1).to(dtype).requires_grad_(grad)


def us(call: Callable[[], object]) -> float:
    """Microseconds of one call, of as many as fill the time; the host runs ahead."""
    for _ in range(3):
        call()
    start, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    start.record()
    for _ in range(5):
        call()
    middle.record()
    middle.synchronize()
    number = max(5, min(1000, int(BATCH_MS / (start.elapsed_time(middle) / 5))))
    torch.cuda._sleep(5_000_000)
    start.record()
    for _ in range(number):
        call()
    end.record()
    end.synchronize()
    return 1000 * start.elapsed_time(end) / number


Case = tuple[dict[str, Any], Callable[[], object]]


def products() -> Iterator[Case]:
    """F, I and W; W alone, added to a gradient in bfloat16, and to one in float32."""
    for shape, tokens, hidden, qkv, inner, vocabulary, heads, _ in SHAPES:
        sizes = {"qkv": (hidden, qkv), "out": (heads * 128, hidden), "head": (hidden, vocabulary)}
        if shape != "2048":
            sizes |= {"gate": (hidden, inner), "gate_up": (hidden, 2 * inner), "down": (inner, hidden)}
        for name, (k, n) in sizes.items():
            about = {"shape": shape, "name": name, "rows": tokens, "inner": k, "columns": n}
            x, weight, back = made(tokens, k), made(k, n), made(tokens, n)
            narrow, wide = made(k, n), made(k, n, dtype=torch.float32)
            yield {**about, "phase": "F"}, lambda x=x, w=weight: torch.mm(x, w)
            yield {**about, "phase": "I"}, lambda g=back, w=weight: torch.mm(g, w.t())
            yield {**about, "phase": "W"}, lambda x=x, g=back, out=narrow: torch.mm(x.t(), g, out=out)
            yield {**about, "phase": "W", "added": "bfloat16"}, lambda x=x, g=back, b=narrow: b.addmm_(x.t(), g)
            yield (
                {**about, "phase": "W", "added": "float32"},
                lambda x=x, g=back, b=wide: torch.addmm(b, x.t(), g, out_dtype=torch.float32, out=b),
            )


def _in_place(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Forward of Megatron-LM's cross-entropy over one rank: float32 logits, overwritten; their softmax is kept."""
    wide = logits.float()
    wide -= wide.amax(-1, keepdim=True)
    target = wide.gather(-1, labels.unsqueeze(-1))
    exponentials = wide.exp_() if hasattr(wide, "exp_") else wide.exp()
    total = exponentials.sum(-1, keepdim=True)
    return exponentials.div_(total), total.log() - target


def losses() -> Iterator[Case]:
    """Cross-entropies: float32 copies of logits, in place, compiled."""
    compiled = torch.compile(lambda z, ids: F.cross_entropy(z.float(), ids, reduction="sum"), dynamic=False)
    for rows, vocabulary in WIDE:
        about = {"rows": rows, "columns": vocabulary}
        logits, labels = made(rows, vocabulary, grad=True), torch.randint(vocabulary, (rows,), device="cuda")
        for name, function in (
            ("separate", lambda z, ids: F.cross_entropy(z.float(), ids, reduction="sum")),
            ("compiled", compiled),
        ):
            loss = function(logits, labels)
            yield {**about, "name": name, "phase": "F"}, lambda f=function, z=logits, ids=labels: f(z, ids)
            yield (
                {**about, "name": name, "phase": "I"},
                lambda loss=loss, z=logits: torch.autograd.grad(loss, z, retain_graph=True),
            )
        plain = logits.detach()
        kept, _ = _in_place(plain, labels)
        yield {**about, "name": "in_place", "phase": "F"}, lambda z=plain, ids=labels: _in_place(z, ids)
        scale = made(rows, 1, dtype=torch.float32)
        yield {**about, "name": "in_place", "phase": "I"}, lambda z=kept, s=scale: z.mul_(s).to(torch.bfloat16)


def attention() -> Iterator[Case]:
    """Causal attention as the stages call it, and its backward."""
    sizes = [(shape[0], shape[1], *shape[-2:]) for shape in SHAPES]
    for shape, tokens, heads, kv_heads in [*sizes, ("long", 16384, 8, 8), ("short", 1024, 32, 32)]:
        about = {"shape": shape, "rows": tokens, "heads": heads, "kv_heads": kv_heads}
        q, k, v = (made(1, n, tokens, 128, grad=True) for n in (heads, kv_heads, kv_heads))

        def forward(q: Tensor = q, k: Tensor = k, v: Tensor = v, *, grouped: bool = heads != kv_heads) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)

        out = forward()
        slope = torch.randn_like(out)
        yield {**about, "phase": "F"}, forward
        yield (
            {**about, "phase": "I"},
            lambda o=out, of=(q, k, v), g=slope: torch.autograd.grad(o, of, g, retain_graph=True),
        )


def _swiglu_back(gate: Tensor, up: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
    of_up = F.silu(gate).mul_(slope)
    return torch.ops.aten.silu_backward(slope * up, gate), of_up


def moved() -> Iterator[Case]:
    """Memory-bound operations of a block, step by step as pipeproof's stages run them."""
    for shape, tokens, hidden, _, inner, _, heads, _ in SHAPES:
        about = {"shape": shape, "rows": tokens, "columns": hidden}
        x, y, gain = made(tokens, hidden, grad=True), made(tokens, hidden), made(hidden, grad=True)
        normed = F.rms_norm(x, (hidden,), None, 1e-6)
        yield {**about, "name": "copy"}, lambda y=y: y.clone()
        yield {**about, "name": "add"}, lambda y=y: y + y
        yield {**about, "name": "norm", "phase": "F"}, lambda x=x, n=hidden: F.rms_norm(x, (n,), None, 1e-6)
        yield (
            {**about, "name": "norm", "phase": "I"},
            lambda o=normed, x=x, g=y: torch.autograd.grad(o, x, g, retain_graph=True),
        )
        yield {**about, "name": "gain", "phase": "F"}, lambda y=y, g=gain: y * g
        yield {**about, "name": "gain", "phase": "W"}, lambda y=y: (y * y).sum(0)
        gate, up, slope = made(tokens, inner), made(tokens, inner), made(tokens, inner)
        about = {"shape": shape, "rows": tokens, "columns": inner}
        yield {**about, "name": "swiglu", "phase": "F"}, lambda a=gate, b=up: F.silu(a) * b
        yield {**about, "name": "swiglu", "phase": "I"}, lambda a=gate, b=up, g=slope: _swiglu_back(a, b, g)
        q, cos = made(1, heads, tokens, 128), made(tokens, 128)
        about = {"shape": shape, "rows": tokens, "columns": heads * 128}
        yield {**about, "name": "rotary"}, lambda q=q, c=cos: q * c + q.roll(64, -1) * c


def experts() -> Iterator[Case]:
    """Grouped products, with a Poisson share of the tokens for each expert; even shares next to them."""
    for count, top_k, hidden, inner in EXPERTS:
        visits = 4096 * top_k
        uneven = torch.bincount(torch.randint(count, (visits,)), minlength=count)
        for label, shares in (("even", torch.full((count,), visits // count)), ("poisson", uneven)):
            ends = shares.cumsum(0).to("cuda", torch.int32)
            for name, k, n in (("gate", hidden, inner), ("gate_up", hidden, 2 * inner), ("down", inner, hidden)):
                about = {"experts": count, "shares": label, "name": name, "rows": visits, "inner": k, "columns": n}
                x, weights, back = made(visits, k), made(count, k, n), made(visits, n)
                yield {**about, "phase": "F"}, lambda x=x, w=weights, e=ends: F.grouped_mm(x, w, offs=e)
                yield {**about, "phase": "I"}, lambda g=back, w=weights, e=ends: F.grouped_mm(g, w.mT, offs=e)
                yield {**about, "phase": "W"}, lambda x=x, g=back, e=ends: F.grouped_mm(x.t(), g, offs=e)
        tokens, order = made(4096, hidden), torch.randint(4096, (visits,), device="cuda")
        flat = torch.randint(count, (visits,), device="cuda")
        about = {"experts": count, "rows": visits, "columns": hidden}
        yield {**about, "name": "permute"}, lambda t=tokens, o=order: t.index_select(0, o)
        rows = made(visits, hidden)
        yield {**about, "name": "sum", "phase": "F"}, lambda r=rows, k=top_k: r.unflatten(0, (-1, k)).sum(1)
        yield {**about, "name": "sort"}, lambda f=flat: f.argsort(stable=True)


def host() -> Iterator[Case]:
    """Small kernels, for which the host is the bound: its time of a launch, with autograd and without."""
    x, leaf = made(64, 64), made(64, 64, grad=True)
    yield {"name": "add"}, lambda: x + x
    yield {"name": "mm"}, lambda: x @ x
    yield {"name": "add, autograd"}, lambda: leaf + x
    yield {"name": "mm and its backward"}, lambda: (leaf @ x).sum().backward()


def heated() -> None:
    """Keep the GPU busy for a second and a half: the limit of power is reached then."""
    x = made(8192, 8192)
    until = time.monotonic() + 1.5
    while time.monotonic() < until:
        for _ in range(20):
            torch.mm(x, x)
        torch.cuda.synchronize()


def main() -> None:
    """Time all parts, and write a line for each case."""
    begin = time.monotonic()
    with Path(sys.argv[1]).open("w", encoding="utf-8") as out:

        def write(**line: Any) -> None:
            out.write(json.dumps(line) + "\n")
            out.flush()

        write(part="machine", device=torch.cuda.get_device_name(), torch=torch.__version__)
        for part in (products, losses, attention, moved, experts, host):
            heated()
            try:
                for about, call in part():
                    if time.monotonic() - begin > SECONDS:
                        write(part=part.__name__, error="no time left")
                        break
                    try:
                        write(part=part.__name__, us=round(us(call), 2), **about)
                    except Exception as error:  # noqa: BLE001 - the others continue
                        write(part=part.__name__, error=repr(error)[:300], **about)
            except Exception as error:  # noqa: BLE001 - the others continue
                write(part=part.__name__, error=repr(error)[:300])
            torch.cuda.empty_cache()
            write(part="time", name=part.__name__, seconds=round(time.monotonic() - begin, 1))


if __name__ == "__main__":
    main()
