"""A small GPT in plain PyTorch or plain Paddle, and its training, with faults to plant."""

import importlib
import math

import numpy as np

BATCH, SEQUENCE, HIDDEN, HEADS, VOCAB, MICRO_BATCHES, STEPS = 2, 6, 16, 2, 40, 2, 2


def weights():
    """By name as in PyTorch, matrices [out, in]."""
    random = np.random.default_rng(0)
    shapes = {"embed.weight": (VOCAB, HIDDEN), "norm.weight": (HIDDEN,), "norm.bias": (HIDDEN,),
              "head.weight": (VOCAB, HIDDEN)}  # fmt: skip
    for number in range(2):
        for name, shape in {
            "norm1": (HIDDEN,), "attn.qkv": (3 * HIDDEN, HIDDEN), "attn.out": (HIDDEN, HIDDEN), "norm2": (HIDDEN,),
            "mlp.up": (4 * HIDDEN, HIDDEN), "mlp.down": (HIDDEN, 4 * HIDDEN),
        }.items():  # fmt: skip
            shapes[f"blocks.{number}.{name}.weight"] = shape
            shapes[f"blocks.{number}.{name}.bias"] = shape[:1]
    return {
        name: (random.normal(size=shape) * 0.3 + ("norm" in name and name.endswith("weight"))).astype("f4")
        for name, shape in shapes.items()
    }


def tokens(step, micro_batch):
    random = np.random.default_rng([step, micro_batch])
    return tuple(random.integers(VOCAB, size=(BATCH, SEQUENCE)) for _ in range(2))


def _model(framework, fault):
    """``framework`` is the library; where its functions have other names than the other's, both are here."""
    nn, is_torch = framework.nn, framework.__name__ == "torch"
    base = nn.Module if is_torch else nn.Layer

    class Rotary(base):
        def __init__(self, fault):
            super().__init__()
            self.fault = fault

        def forward(self, x):  # [batch, sequence, heads, head]
            size, numbers = x.shape[-1], {"dtype": framework.float32}
            powers = 100.0 ** (framework.arange(size // 2, **numbers) * 2 / size)
            angles = framework.arange(x.shape[1], **numbers)[:, None] / powers
            cos, sin = angles.cos()[:, None], angles.sin()[:, None]
            if self.fault == "rotary":
                first, second = x[..., 0::2], x[..., 1::2]
                return framework.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2)
            first, second = x.chunk(2, -1)
            return framework.concat((first * cos - second * sin, second * cos + first * sin), -1)

    class Attention(base):
        def __init__(self, fault):
            super().__init__()
            self.fault = fault
            self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
            self.rotary_q, self.rotary_k = Rotary(fault), Rotary(fault)
            self.out = nn.Linear(HIDDEN, HIDDEN)

        def forward(self, x):
            q, k, v = self.qkv(x).reshape([*x.shape[:2], 3, HEADS, HIDDEN // HEADS]).unbind(2)
            q, k = self.rotary_q(q), self.rotary_k(k)
            q, k, v = (each.moveaxis(1, 2) for each in (q, k, v))
            size = q.shape[-1]
            scores = q @ k.moveaxis(2, 3) / (size if self.fault == "attention" else math.sqrt(size))
            length = x.shape[1]
            scores = scores + framework.full([length, length], -1e9).triu(1)
            return self.out((nn.functional.softmax(scores, -1) @ v).moveaxis(1, 2).reshape(x.shape))

    class Mlp(base):
        def __init__(self, fault):
            super().__init__()
            self.fault = fault
            self.up, self.act, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN)

        def forward(self, x):
            y = self.act(self.up(x))
            if self.fault == "cast":
                y = y.to(framework.bfloat16).to(framework.float32)
            return self.down(y)

    class Dropout(base):
        """Dropout from one stream of numpy, the same in both frameworks."""

        def __init__(self, seed):
            super().__init__()
            self.random = np.random.default_rng(seed)

        def forward(self, x):
            return x * _tensor(framework, (self.random.random(tuple(x.shape)) >= 0.1).astype("f4")) / 0.9

    class Block(base):
        def __init__(self, fault):
            super().__init__()
            self.fault = fault
            epsilon = {"eps" if is_torch else "epsilon": 1e-3 if fault == "epsilon" else 1e-5}
            self.norm1, self.attn = nn.LayerNorm(HIDDEN), Attention(fault)
            self.norm2, self.mlp = nn.LayerNorm(HIDDEN, **epsilon), Mlp(fault)
            self.drop = Dropout(2 if fault == "dropout" else 1)

        def forward(self, x):
            read = self.norm1(x)
            attended = self.drop(self.attn(read))
            if self.fault == "residual":
                x = x.moveaxis(0, 1).reshape(x.shape)
            if self.fault == "norm":
                x = read
            if self.fault == "detached":
                x = x.detach()
            x = x + attended
            return x + self.mlp(self.norm2(x))

    class Model(base):
        def __init__(self):
            super().__init__()
            blocks = [Block(fault if number else "") for number in range(2)]
            self.embed = nn.Embedding(VOCAB, HIDDEN)
            self.blocks = nn.ModuleList(blocks) if is_torch else nn.LayerList(blocks)
            self.norm = nn.LayerNorm(HIDDEN)
            self.head = nn.Linear(HIDDEN, VOCAB, **{"bias" if is_torch else "bias_attr": False})

        def forward(self, x):
            x = self.embed(x)
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    return Model()


def _tensor(framework, value):
    return framework.from_numpy(value) if framework.__name__ == "torch" else framework.to_tensor(value)


def train(name, directory, fault=""):
    """Train the model in the framework of this name, and record its layers."""
    framework, is_torch = importlib.import_module(name), name == "torch"
    model = _model(framework, fault)
    parameters = dict(model.named_parameters())
    with framework.no_grad():
        for weight, value in weights().items():
            is_matrix = value.ndim == 2 and weight != "embed.weight"
            if is_torch:
                parameters[weight].copy_(framework.from_numpy(value))
            else:
                parameters[weight].set_value(value.T if is_matrix else value)
    rate = 0.2 if fault == "rate" else 0.1
    if is_torch:
        optimizer = framework.optim.SGD(model.parameters(), lr=rate)
    else:
        clip = framework.nn.ClipGradByGlobalNorm(0.5) if fault == "clip" else None
        optimizer = framework.optimizer.SGD(rate, parameters=model.parameters(), grad_clip=clip)
    with importlib.import_module(f"pipeproof.{name}").record_layers(model, directory, names=["*"]):
        for step in range(STEPS):
            for micro_batch in range(MICRO_BATCHES):
                x, y = (_tensor(framework, each) for each in tokens(step, micro_batch))
                loss = framework.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
                if fault == "reduction":
                    optimizer.zero_grad()
                (loss / (1 if fault == "loss" else MICRO_BATCHES)).backward()
            if fault == "scale":
                for weight in model.parameters():
                    weight.grad /= MICRO_BATCHES
            if fault == "clip" and is_torch:
                framework.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
