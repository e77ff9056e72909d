"""Checks of the model's sizes against the ranks that shard them, and against the sequences of the schedule."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain

from pipeproof.diagnostics.problems import KeyPath, Problem, describe_value, dotted, listed, nearest_name
from pipeproof.specs.custom_layers import SEQUENCE, CustomLayerSpec, CustomModelSpec, LayerOutputSpec
from pipeproof.specs.model import ModelSpec, MoeSpec
from pipeproof.specs.plan_sections import PlanSections
from pipeproof.specs.section import divisors, multiples


def check_tensor_parallel(plan: PlanSections) -> list[Problem]:
    """PP108: sizes that are sharded over the TP ranks divide by their number."""
    model, topology = plan.gpt, plan.topology
    sharded: list[tuple[KeyPath, int, str]] = [
        (("num_heads",), model.num_heads, "attention heads are sharded over the TP ranks"),
    ]
    if model.compressed_attention is not None:
        groups = model.compressed_attention.o_groups
        sharded.append((("compressed_attention", "o_groups"), groups, "the groups' products are sharded over them"))
    if model.num_kv_heads is not None:
        sharded.append((("num_kv_heads",), model.num_kv_heads, "key and value heads are sharded over the TP ranks"))
    if model.moe is None or model.moe.dense_layers:
        sharded.append((("ffn_size",), model.ffn_size, "the MLP is sharded over the TP ranks"))
    if model.moe is not None and (model.moe.num_shared_experts or not topology.experts_over_tp):
        sharded.append((("moe", "ffn_size"), model.moe.ffn_size, "every expert is sharded over the TP ranks"))
    sharded.append((("vocab_size",), model.vocab_size, "embedding and head are sharded over the TP ranks"))
    if topology.sequence_parallel:
        reason = "sequence parallelism shards the sequence over the TP ranks"
        sharded.append((("seq_length",), model.seq_length, reason))
    return [
        Problem(
            "PP108",
            ("model", *path),
            f"{dotted(('model', *path))} {size} does not divide by topology.tp {topology.tp}: {reason}",
            help=_sizes_that_divide(model, path, size, topology.tp) + f"topology.tp to {divisors(size, topology.tp)}",
        )
        for path, size, reason in sharded
        if size % topology.tp
    ]


def _sizes_that_divide(model: ModelSpec, path: KeyPath, size: int, tp: int) -> str:
    """The beginning of a help: the sizes next to ``size`` that divide by ``tp`` and keep groups of heads whole."""
    fitting = multiples(size, tp)
    if path == ("num_kv_heads",):
        near = [n for n in range(tp, model.num_heads + 1, tp) if model.num_heads % n == 0]
        fitting = listed(sorted(sorted(near, key=lambda n: abs(n - size))[:2])) if near else ""
    return f"set {dotted(('model', *path))} to {fitting}, or " if fitting else "set "


def check_expert_parallel(plan: PlanSections) -> Iterator[Problem]:
    """PP108: experts, and the tokens sent to them at equal loads, divide over the EP or TP ranks.

    PP106: keys of an all-to-all are not given for another dispatcher; experts are distributed over one axis.
    """
    moe, topology = plan.model.moe, plan.topology
    if moe is None:
        return
    yield from _check_dispatcher(moe)
    axis, size = ("tp", topology.tp) if topology.experts_over_tp else ("ep", topology.ep)
    if topology.experts_over_tp and topology.ep > 1:
        message = f"topology.experts_over_tp distributes experts over the TP ranks, and topology.ep {topology.ep} over "
        fix = f"set topology.ep to 1 and topology.dp to {topology.dp * topology.ep}, or remove experts_over_tp"
        yield Problem("PP106", ("topology", "experts_over_tp"), f"{message}the EP ranks", help=fix)
    if size == 1:
        return
    if moe.num_experts % size:
        yield Problem(
            "PP108",
            ("model", "moe", "num_experts"),
            f"model.moe.num_experts {moe.num_experts} does not divide by topology.{axis} {size}: experts are "
            f"distributed over the {axis.upper()} ranks",
            help=f"set model.moe.num_experts to {multiples(moe.num_experts, size)}, "
            f"or topology.{axis} to {divisors(moe.num_experts, size)}",
        )
    unit = size * topology.cp
    for path, length in plan.sequence_lengths.items():
        sent = length // plan.schedule.num_sequence_splits * moe.top_k
        if sent % unit:
            yield Problem(
                "PP108",
                path,
                f"{sent} tokens go to experts ({dotted(path)} {length}, model.moe.top_k {moe.top_k}), which does "
                f"not divide by {unit}: each of the topology.{axis} {size} x topology.cp {topology.cp} ranks "
                "is assumed to get the same number",
                help=f"set {dotted(path)} to a multiple of {unit * plan.schedule.num_sequence_splits}",
            )


def _check_dispatcher(moe: MoeSpec) -> Iterator[Problem]:
    """An all-gather sends every token to every rank, once and unchanged."""
    if moe.dispatcher == "all_to_all":
        return
    for key in ("nodes_per_token", "dispatch_dtype", "router_dtype"):
        if getattr(moe, key) is not None:
            message = f"model.moe.{key} is for tokens that go to the ranks of their experts, and model.moe.dispatcher "
            message += f"{moe.dispatcher} takes all tokens to all ranks"
            fix = f"remove {key}, or use `dispatcher: all_to_all`"
            yield Problem("PP106", ("model", "moe", key), message, help=fix)
    if moe.hash_layers > 0:
        message = f"model.moe.hash_layers {moe.hash_layers} choose experts by token id, and model.moe.dispatcher "
        message += f"{moe.dispatcher} gathers tokens without their ids"
        yield Problem("PP106", ("model", "moe", "hash_layers"), message, help="use `dispatcher: all_to_all`")


def check_mtp(plan: PlanSections) -> Iterator[Problem]:
    """PP108: every module has a token to predict in the shortest sequence; PP106: with streams it embeds itself."""
    mtp = plan.gpt.mtp
    if mtp is None:
        return
    if plan.gpt.hyper_connections is not None and not mtp.embeds_again:
        message = "the embedded tokens of `model.mtp` modules cross between stages next to the several streams of "
        message += "`model.hyper_connections`, which are wider"
        fix = "set model.mtp.magic_send to true: modules look up their tokens themselves"
        yield Problem("PP106", ("model", "mtp"), message, help=fix, at_key=True)
    streams = plan.gpt.hyper_connections
    if mtp.reads == "streams" and (mtp.num_modules > 1 or streams is None or streams.contraction == "sum"):
        message = "model.mtp.reads is streams, which needs one module and a learned contraction "
        message += "(`model.hyper_connections`)"
        yield Problem("PP106", ("model", "mtp", "reads"), message, help="set it to after_norm")
    if mtp.magic_send and mtp.embedding == "own":
        message = "model.mtp.magic_send copies the embedding of the main model, and model.mtp.embedding is own"
        yield Problem("PP106", ("model", "mtp", "magic_send"), message, help="remove magic_send")
    lengths = plan.sequence_lengths
    shortest = min(lengths, key=lengths.__getitem__)
    if lengths[shortest] <= mtp.num_modules:
        message = f"the last of model.mtp.num_modules {mtp.num_modules} predicts a token {mtp.num_modules + 1} ahead, "
        message += f"and {dotted(shortest)} is {lengths[shortest]}"
        fix = f"set {dotted(shortest)} to {mtp.num_modules + 1} at least"
        if lengths[shortest] > 1:
            fix += f", or model.mtp.num_modules to at most {lengths[shortest] - 1}"
        yield Problem("PP108", shortest, message, help=fix)


def check_compressed_attention(plan: PlanSections) -> Iterator[Problem]:
    """PP106: every rank and split has whole sequences; PP108: the shortest sequence makes an entry."""
    spec, topology = plan.gpt.compressed_attention, plan.topology
    if spec is None:
        return
    divided: list[tuple[KeyPath, int, str]] = [
        (("topology", "cp"), topology.cp, "ranks"),
        (("schedule", "num_sequence_splits"), plan.schedule.num_sequence_splits, "splits"),
    ]
    for path, size, parts in divided:
        if size > 1:
            message = f"{dotted(path)} {size} divides sequences over {parts}, and the windows of "
            message += "`model.compressed_attention` need the tokens before them"
            yield Problem("PP106", path, message, help="set it to 1")
    rates = {kind: spec.rate_of(kind) or 1 for kind in spec.layer_types}
    kind = max(rates, key=rates.__getitem__)
    longest, of_documents = max(spec.documents or (0,)), ("model", "compressed_attention", "documents")
    for path, length in {of_documents: longest}.items() if longest else plan.sequence_lengths.items():
        if length < rates[kind]:
            message = f"{dotted(path)} {length} makes no entry of {kind}: model.compressed_attention.compress_rates "
            message += f"has {rates[kind]} tokens for it"
            yield Problem("PP108", path, message, help=f"set it to {rates[kind]} at least")
    for path, length in plan.sequence_lengths.items() if spec.documents else ():
        if (total := sum(spec.documents or ())) != length:
            message = f"{dotted(of_documents)} has {total} tokens, and {dotted(path)} {length}"
            yield Problem("PP108", of_documents, message, help=f"give documents of {length} tokens together")


def check_splits(plan: PlanSections) -> Iterator[Problem]:
    """PP108: sequences divide into their splits, and these over the TP ranks; PP106: not with context parallelism."""
    schedule, topology = plan.schedule, plan.topology
    num_splits = schedule.num_sequence_splits
    if num_splits == 1:
        return
    if topology.cp > 1:
        message = f"sequences are divided into {num_splits} successive splits, and over {topology.cp} cp ranks"
        fix = "use one of the two: cp 1, or 1 split"
        yield Problem("PP106", ("schedule", "num_sequence_splits"), message, help=fix)
        return
    unit = num_splits * (topology.tp if topology.sequence_parallel else 1)
    for path, length in plan.sequence_lengths.items():
        if length % unit:
            reason = f"schedule.num_sequence_splits {num_splits}"
            if unit != num_splits:
                reason += f" x topology.tp {topology.tp} (sequence parallelism)"
            message = f"{dotted(path)} {length} does not divide by {reason}"
            yield Problem("PP108", path, message, help=f"set it to {multiples(length, unit)}")


_NAME = re.compile(r"[A-Za-z_][\w.-]*", re.ASCII)


def check_custom_layers(plan: PlanSections, model: CustomModelSpec) -> Iterator[Problem]:
    """Return the problems of the declared layers (PP104, PP106), and of the rest of the plan with them."""
    yield from _check_layers(model)
    yield from _check_gradients_between(plan, model)
    yield from _check_times(model)
    yield from _check_lengths(plan, model)
    yield from _check_edges(plan, model)
    yield from _check_modules(plan, model)
    for is_set, path, fact, fix in (*_refused_splits(plan), *_refused_work(plan, model)):
        if is_set:
            yield Problem("PP106", path, fact, help=fix)


_WHOLE, _PARTS = ("forward_us", "backward_us"), ("forward_us", "backward_input_us", "backward_weight_us")


def _check_times(model: CustomModelSpec) -> Iterator[Problem]:
    """PP104, PP106: all layers have a forward and a backward time, whole or in its parts, or no layer has any."""
    first = next((layer for layer in model.layers if layer.times), None)
    if first is None:
        return
    wanted = _WHOLE if "backward_us" in first.times else _PARTS
    fix = f"give each layer {listed([f'`{key}`' for key in wanted], 'and')}, or none of them"
    for index, layer in enumerate(model.layers):
        other = next((key for key in layer.times if key not in wanted), None)
        missing = next((key for key in wanted if key not in layer.times), None)
        path: KeyPath = ("model", "layers", index)
        if other is not None:
            message = f"`{layer.name}` has `{other}`, and `{first.name}` has `{wanted[1]}`"
            yield Problem("PP106", (*path, other), message, help=fix, at_key=True)
        elif missing is not None:
            message = f"`{layer.name}` has no `{missing}`, and `{first.name}` has `{next(iter(first.times))}`"
            yield Problem("PP104", path, message, help=fix)


def _check_lengths(plan: PlanSections, model: CustomModelSpec) -> Iterator[Problem]:
    """PP106: the size `s` represents lengths of sequences, which must be given."""
    outputs: list[tuple[str, LayerOutputSpec, KeyPath]] = [
        (f"an output of `{layer.name}`", out, ("model", "layers", index, "out", position))
        for index, layer in enumerate(model.layers)
        for position, out in enumerate(layer.out)
    ]
    outputs += [(f"`{edge.name}`", edge, ("edges", index)) for index, edge in enumerate(plan.edges)]
    for what, out, path in outputs:
        if SEQUENCE in out.shape and plan.schedule.seq_lengths is None:
            message = f"{what} has the size `{SEQUENCE}`, and schedule.seq_lengths is not given"
            fix = "give the length of each micro-batch, or write a number"
            yield Problem("PP106", (*path, "shape"), message, help=fix)


def _check_modules(plan: PlanSections, model: CustomModelSpec) -> Iterator[Problem]:
    """PP106: modules have all stages, in order, and the plan's ranks; PP108: replicas share micro-batches evenly."""
    schedule, begin, names = plan.schedule, 0, set[str]()
    for index, module in enumerate(plan.modules):
        path: KeyPath = ("modules", index)
        if module.name in names:
            message = f"several modules are named `{module.name}`"
            yield Problem("PP106", (*path, "name"), message, help="give each module a name of its own")
        names.add(module.name)
        if module.stages[0] != begin:
            message = f"module `{module.name}` begins with stage {module.stages[0]}, and the modules before it end "
            message += f"before stage {begin}"
            yield Problem("PP106", (*path, "stages"), message, help=f"begin with stage {begin}")
        begin = module.stages[1] + 1
        if schedule.num_micro_batches % module.dp:
            message = f"module `{module.name}` has dp {module.dp}, and schedule.num_micro_batches "
            message += f"{schedule.num_micro_batches} do not divide into {module.dp} equal shares"
            fix = f"set schedule.num_micro_batches to {multiples(schedule.num_micro_batches, module.dp)}"
            yield Problem("PP108", (*path, "dp"), message, help=fix)
    if not plan.modules:
        return
    num_ranks = sum(module.num_ranks * module.dp for module in plan.modules)
    is_shared = isinstance(schedule.placement, tuple)  # a rank may have stages of several modules
    if num_ranks != plan.topology.pp and not is_shared:
        counts = " + ".join(f"{module.num_ranks} x {module.dp} of `{module.name}`" for module in plan.modules)
        message = f"the modules have {num_ranks} ranks ({counts}), and topology.pp is {plan.topology.pp}"
        yield Problem("PP106", ("topology", "pp"), message, help=f"set topology.pp to {num_ranks}")
    if schedule.num_chunks > 1 and schedule.num_chunks != (most := max(module.num_chunks for module in plan.modules)):
        message = f"schedule.num_chunks is {schedule.num_chunks}, and the ranks of `modules` have up to {most} stages"
        yield Problem("PP106", ("schedule", "num_chunks"), message, help="remove it: modules have their own")
    yield from _check_frozen(plan, model)


def _check_frozen(plan: PlanSections, model: CustomModelSpec) -> Iterator[Problem]:
    """PP106: something is trained, and no weight is trained in one module and frozen in another."""
    if plan.first_trained == plan.num_stages:
        yield Problem("PP106", ("modules",), "all modules are frozen", help="remove `frozen` of one of them")
    if plan.frozen_stages and plan.run.clip_norm is not None:
        message = "`run.clip_norm` sums a norm over all ranks, and a frozen module has no gradients"
        yield Problem("PP106", ("run", "clip_norm"), message, help="remove it, or train all modules")
    borrower = next((index for index, layer in enumerate(model.layers) if layer.borrows), None)
    if plan.frozen_stages and borrower is not None:
        message = f"`{model.layers[borrower].name}` borrows weights, and a module is frozen: a weight that is trained "
        message += "in one module and not in another has no defined gradient"
        fix = "remove `borrows`, or train all modules"
        yield Problem("PP106", ("model", "layers", borrower, "borrows"), message, help=fix)


def _check_edges(plan: PlanSections, model: CustomModelSpec) -> Iterator[Problem]:
    """PP106: an edge has a name of its own, and leads from a layer of a stage to later layers."""
    names: set[str] = set()
    stages = [[layer.name for layer in model.layers]] if not isinstance(plan.stages, tuple) else plan.stages
    order = {name: number for number, name in enumerate(chain.from_iterable(stages))}
    for index, edge in enumerate(plan.edges):
        path: KeyPath = ("edges", index)
        if not edge.name.isidentifier() or edge.name in names:
            message = f"an edge has a name of its own of letters, digits and _, found {describe_value(edge.name)}"
            yield Problem("PP106", (*path, "name"), message, help="rename it")
        names.add(edge.name)
        if not edge.consumers or len({*edge.consumers}) < len(edge.consumers):
            message = f"`{edge.name}` has the consumers {', '.join(edge.consumers) or '(none)'}"
            yield Problem("PP106", (*path, "consumers"), message, help="name each layer that uses it once")
        where: list[tuple[str, KeyPath]] = [(edge.producer, (*path, "producer"))]
        where += [(name, (*path, "consumers", position)) for position, name in enumerate(edge.consumers)]
        for name, at in where:
            if name not in order:
                near = nearest_name(name, order)
                fix = f"did you mean `{near}`?" if near else "name layers of model.layers that are in a stage"
                yield Problem("PP106", at, f"`{edge.name}` names `{name}`, which is not a layer of a stage", help=fix)
            elif at[2] == "consumers" and edge.producer in order and order[name] <= order[edge.producer]:
                message = f"`{name}` uses `{edge.name}`, and does not come after `{edge.producer}`, which makes it"
                yield Problem("PP106", at, message, help="name later layers than the producer")
        yield from _check_gradient(edge, path)
        if edge.route == "direct" and (plan.buffers.free_output != "after_backward" or plan.buffers.has_slots):
            message = f"slots and outputs that are freed early are not planned for `{edge.name}`, "
            message += "which is sent directly"
            fix = "use `route: relay`, or remove the keys of `buffers`"
            yield Problem("PP106", (*path, "route"), message, help=fix)


def _check_gradient(out: LayerOutputSpec, path: KeyPath) -> Iterator[Problem]:
    if out.gradient and out.dtype is not None and "float" not in out.dtype:
        message = f"a tensor of {out.dtype} has no gradient, and `gradient` is true"
        yield Problem("PP106", (*path, "gradient"), message, help="remove `gradient`")


def _check_layers(model: CustomModelSpec) -> Iterator[Problem]:
    if not model.layers:
        yield Problem("PP106", ("model", "layers"), "`model.layers` is empty", help="declare each layer")
    indices: dict[str, int] = {}
    weights: dict[str, tuple[int, ...]] = {}
    declared: set[str] = set()
    last = len(model.layers) - 1
    for index, layer in enumerate(model.layers):
        path: KeyPath = ("model", "layers", index)
        if not _NAME.fullmatch(layer.name):
            message = f"a layer's name has letters, digits, dots and dashes, found {describe_value(layer.name)}"
            yield Problem("PP106", (*path, "name"), message)
        if layer.name in indices:
            message = f"layer {index} has the name `{layer.name}` of layer {indices[layer.name]}"
            yield Problem("PP106", (*path, "name"), message, help="give each layer its own name")
        indices.setdefault(layer.name, index)
        yield from _check_out(layer, path, is_last=index == last)
        yield from _check_borrowed(layer, path, weights)
        for position, weight in enumerate(layer.parameters):
            name = f"{layer.name}.{weight.name}"
            if name in declared:
                message = f"the weight `{name}` is declared twice"
                yield Problem("PP106", (*path, "parameters", position, "name"), message, help="remove one of the two")
            declared.add(name)
        weights |= {f"{layer.name}.{weight.name}": weight.shape for weight in layer.parameters}


def _check_gradients_between(plan: PlanSections, model: CustomModelSpec) -> Iterator[Problem]:
    """PP106: a gradient comes back to each layer, except before all trained modules."""
    first = plan.first_trained
    share, remainder = divmod(len(model.layers), max(1, plan.num_stages))
    even = first * share + min(first, remainder)
    num_frozen = sum(map(len, plan.stages[:first])) if isinstance(plan.stages, tuple) else even
    for index, layer in enumerate(model.layers[:-1]):
        if index >= num_frozen and layer.out and not any(out.has_gradient for out in layer.out):
            message = f"no output of `{layer.name}` has a gradient: no layer before it would learn"
            path: KeyPath = ("model", "layers", index, "out")
            yield Problem("PP106", path, message, help="merge it with the layer after it")


def _check_out(layer: CustomLayerSpec, path: KeyPath, *, is_last: bool) -> Iterator[Problem]:
    if is_last and layer.out:
        message = f"`{layer.name}` is the last layer: its output goes to the loss function, not to a layer"
        yield Problem("PP106", (*path, "out"), message, help="remove `out`", at_key=True)
    elif not is_last and not layer.out:
        message = f"`{layer.name}` does not declare its output to the next layer"
        yield Problem("PP104", path, message, help="add `out: [{shape: [b, ...]}]`")
    for position, out in enumerate(layer.out):
        yield from _check_gradient(out, (*path, "out", position))


def _check_borrowed(layer: CustomLayerSpec, path: KeyPath, weights: dict[str, tuple[int, ...]]) -> Iterator[Problem]:
    for position, name in enumerate(layer.borrows):
        if name not in weights:
            near = nearest_name(name, weights)
            yield Problem(
                "PP106",
                (*path, "borrows", position),
                f"`{layer.name}` borrows `{name}`, which no layer before it has",
                help=f"did you mean `{near}`?" if near else "write LAYER.NAME, with the name that the layer declares",
            )


_Refused = tuple[bool, KeyPath, str, str]
"""A key that custom layers cannot support: is it given, the key, the fact, and the alternative."""


def _refused_splits(plan: PlanSections) -> list[_Refused]:
    """Keys that split the model over ranks, micro-batches and stages."""
    topology, schedule = plan.topology, plan.schedule
    reason = "custom layers do not declare how they are sharded"
    return [
        *(
            (size > 1, ("topology", axis), f"topology.{axis} is {size}, and {reason}", "set it to 1, or use pp and dp")
            for axis, size in (("tp", topology.tp), ("cp", topology.cp), ("ep", topology.ep))
        ),
        (
            schedule.num_sequence_splits > 1,
            ("schedule", "num_sequence_splits"),
            "sequences of custom layers cannot be split: the reach of their attention is not known",
            "set it to 1",
        ),
        (
            schedule.last_micro_batch_size is not None,
            ("schedule", "last_micro_batch_size"),
            "custom layers declare one shape for all micro-batches",
            "remove it",
        ),
        (
            plan.loss.normalization != "mean_of_micro_batches",
            ("loss", "normalization") if "normalization" in plan.loss.model_fields_set else ("model", "kind"),
            "the loss function of custom layers returns one number per micro-batch, and micro-batches count equally",
            "write `loss: {normalization: mean_of_micro_batches}`",
        ),
        (
            isinstance(plan.stages, str),
            ("stages",),
            "the class names of custom layers are not known here",
            "list the names of the layers of each stage",
        ),
        (bool(plan.boundaries), ("boundaries",), "the tensors between custom layers are their `out`", "remove it"),
    ]


def _refused_work(plan: PlanSections, model: CustomModelSpec) -> list[_Refused]:
    """Keys of the activations and the computations of a layer."""
    memory = plan.memory
    unmeasured = next((layer.name for layer in model.layers if layer.activation_bytes is None), None)
    return [
        (
            memory.recompute != "none",
            ("memory", "recompute"),
            "pipeproof does not recompute custom layers",
            "remove it; a layer may call paddle.distributed.fleet.utils.recompute itself",
        ),
        (
            memory.offload_blocks > 0,
            ("memory", "offload_blocks"),
            "the activations of custom layers are not copied to host memory",
            "remove it",
        ),
        (
            memory.budget_gib is not None and unmeasured is not None,
            ("memory", "budget_gib"),
            f"layer `{unmeasured}` has no `activation_bytes`: the budget cannot be checked",
            "give each layer's `activation_bytes`, as `Pipeline.plan.save` does, or remove it",
        ),
        (
            plan.cost.analytic is not None,
            ("cost", "analytic"),
            "the work of custom layers is not known",
            "give forward_us and backward_us, or measure them: `Pipeline.profile`",
        ),
        (
            plan.run.main_grad_dtype is not None,
            ("run", "main_grad_dtype"),
            "gradients of custom layers are accumulated in run.dtype",
            "remove it",
        ),
    ]
