"""For each error rule that kills no bug of the zoo alone: a right form near it and a mutant that only this rule kills.

Each is listed under its rule's code.
"""

import dataclasses

from pipeproof.comm.backends import table_named
from pipeproof.comm.plan_context import Mesh
from pipeproof.schedule.columns import NONE, Row
from pipeproof.schedule.op_table import build_graph
from pipeproof.schedule.ops import TRANSFER_KINDS, parse_op
from pipeproof.stages.describe.gradient_facts import GradientFacts, Loss, ParameterGradient
from pipeproof.verify.declared_facts import ExpertRouting, Facts, Role
from tests.plans import subject
from tests.zoo.accept import LOSS_ON_RANK_0
from tests.zoo.case import Case
from tests.zoo.e_scale import of_scale
from tests.zoo.facts import stated
from tests.zoo.programs import of_program, program
from tests.zoo.reshards import RESHARDS
from tests.zoo.rows import changed


def cut(*stages):
    """A plan with its layers on these stages."""
    return lambda: subject(stages=[list(stage) for stage in stages])


def with_loss_on(rank):
    """A V of four stages on two ranks, whose code builds the loss on this rank."""
    roles = (Role(0, "embedding"), Role(rank, "loss"))
    return lambda: dataclasses.replace(program(LOSS_ON_RANK_0), facts=Facts(roles=roles))


def with_a_stranger_s_forward():
    """A plan of two stages whose first rank also runs a forward of a micro-batch that the plan does not have."""
    one = subject()
    rows = one.graph.rows()
    rows[0].insert(0, Row(parse_op("0F9")))
    return one.with_graph(build_graph(rows, one.graph.tensors, one.graph.groups))


def alternating():
    """A plan whose overlapped pairs alternate at the exchanges of experts."""
    return subject(
        model={"moe": {"num_experts": 4, "top_k": 2, "ffn_size": 16}},
        topology={"pp": 2, "ep": 2},
        schedule={"kind": "dualpipe_v", "num_chunks": 2, "overlap": "pairs"},
    )


def sent_too_early():
    """Such a plan; the first rank sends the output of its first pair before the last part of the forward."""
    one = alternating()
    rows = one.graph.rows()
    ops = [str(row.op) for row in rows[0]]
    rows[0].insert(ops.index("0F3/3.PART"), rows[0].pop(ops.index("0SEND_F3")))
    return one.with_graph(build_graph(rows, one.graph.tensors, one.graph.groups))


def with_layers(change):
    """A plan under sequence parallelism whose layers were described otherwise."""
    one = subject(topology={"pp": 2, "tp": 2, "sequence_parallel": True})
    layers = tuple(change(layer) for layer in one.plan.layers)
    return dataclasses.replace(one, lowered=dataclasses.replace(one.plan, layers=layers))


def combined(*experts):
    """Four experts on two ranks, whose results the second rank takes back for these."""
    rows = {0: (0, 1, 2, 3), 1: (0, 1, 2, 3)}
    routing = ExpertRouting("layer 3", (0, 1), rows, {0: (0, 1), 1: (2, 3)}, {**rows, 1: experts})
    return lambda: stated(num_ranks=2, expert_routings=(routing,))


def with_activation(tp):
    """A plan under sequence parallelism that declares the activation's layout itself."""
    boundaries = [{"name": "hidden", "dims": "sbh", "tp": tp}]
    return lambda: subject(topology={"pp": 2, "tp": 2, "sequence_parallel": True}, boundaries=boundaries)


def without_a_collective():
    """A plan in which no TP rank issues the all-reduce behind an attention."""
    return changed(subject(topology={"tp": 2}), lambda row: None if str(row.op) == "0F0/1.ALL_REDUCE:tp" else row)


def clipped_over_stages(change):
    """A plan that clips gradients, with its rows changed."""
    return changed(subject(run={"clip_norm": 1.0}), change)


def with_crossed_replicas():
    """A plan of two replicas (ranks 0 and 2, 1 and 3); each stage sends to the other replica's stage."""
    other_replica = {0: 1, 1: 0, 2: 3, 3: 2}

    def cross(row):
        if row.op.kind not in TRANSFER_KINDS:
            return row
        return dataclasses.replace(row, peer=other_replica[row.peer], tensor=NONE, start=0, stop=0)

    return changed(subject(topology={"dp": 2}), cross)


def repeated_sum():
    """A plan of two replicas that sums the gradient of a norm of its first stage once more, after all others."""
    one = subject(topology={"dp": 2})
    rows = one.graph.rows()
    for of_rank in rows:
        sums = [row for row in of_rank if str(row.op).startswith("0REDUCE_GRAD:dp/")]
        if sums:
            again = dataclasses.replace(sums[1], op=sums[1].op._replace(index=len(sums)))
            of_rank.insert(of_rank.index(sums[-1]) + 1, again)
    return one.with_graph(build_graph(rows, one.graph.tensors, one.graph.groups))


def exchanging_shapes():
    """A plan that sends the shape of each tensor ahead of it."""
    return subject(transport={"shape_exchange": "per_message"})


def in_one_group_call(num_sends):
    """A program that sends so many micro-batches in one batch, on NCCL."""
    each = range(num_sends)
    sender = [text for form in ("0F{}", "0SEND_F{}{{batch=0}}", "WAIT(0SEND_F{})") for text in map(form.format, each)]
    receiver = [f"1RECV_F{i}! 1F{i}" for i in each]
    text = f"rank 0: {' '.join(sender)}\nrank 1: {' '.join(receiver)}"
    return lambda: dataclasses.replace(program(text), backend=table_named("torch-nccl"))


def with_slots(receive_slots):
    """A plan of four stages with so many receive slots on each rank."""
    return lambda: subject(
        topology={"pp": 4}, schedule={"num_micro_batches": 8}, buffers={"receive_slots": receive_slots}
    )


def with_budget(kind):
    """A plan of four micro-batches, with memory for the activations of two of them."""
    return lambda: subject(schedule={"kind": kind}, memory={"budget_gib": 0.00015})


WHOLE = (("embed", "layer.0", "layer.1"), ("layer.2", "layer.3", "norm", "head"))

TWO_MICRO_BATCHES = """
    rank 0: 0F0 0SEND_F0{peer=1} 0F1 0SEND_F1{peer=1} WAIT(0SEND_F0) WAIT(0SEND_F1)
    rank 1: 1RECV_F0!{peer=0} 1F0 1RECV_F1!{peer=0} 1F1
"""

ONE_TENSOR = """
    tensor sent: shape=8x4 dtype=float32 dims=sh strides=4x1
    tensor wanted: shape=8x4 dtype=float32 dims=sh
    rank 0: 0F0 0SEND_F0!{tensor=0 range=0..32}
    rank 1: 1RECV_F0!{tensor=1 range=0..32} 1F0
"""

AMAX = """
    group tp: 0 1 2
    rank 0: 0F0 0ALL_REDUCE0:tp{group=0 range=0..8 reduction=max}
    rank 1: 0F0 0ALL_REDUCE0:tp{group=0 range=0..8 reduction=max}
    rank 2: 0F0 0ALL_REDUCE0:tp{group=0 range=0..8 reduction=max}
"""

ANNOUNCED = """
    tensor short: shape=8x4 dtype=float32 dims=sh
    tensor long: shape=16x4 dtype=float32 dims=sh
    rank 0: 0F0 0SEND_META_F0!{tensor=0} 0SEND_F0!{tensor=0 range=0..32} \
            0F1 0SEND_META_F1!{tensor=1} 0SEND_F1!{tensor=1 range=0..64}
    rank 1: 1RECV_META_F0! 1RECV_F0!{tensor=0 range=0..32} 1F0 1RECV_META_F1! 1RECV_F1!{tensor=1 range=0..64} 1F1
"""

GATHER_ON_A_SIDE_STREAM = """
    group tp: 0
    rank 0: 0F0{writes=act} 0B0 WAIT(0F0){queue=side} 0ALL_GATHER:tp{queue=side reads=act group=0} WAIT(0ALL_GATHER:tp)
"""

ROUND_TRIP = """
    rank 0: 0F0 WAIT(0F0){queue=offload} 0OFFLOAD0{queue=offload} WAIT(0OFFLOAD0) FREE(0OFFLOAD0) \
            0RELOAD0{queue=offload} WAIT(0RELOAD0) 0B0 0STEP
"""

TWO_SLOTS = """
    rank 0: 0F0 0SEND_F0! 0F1 0SEND_F1!
    rank 1: 1RECV_F0!{writes=recv0} 1RECV_F1!{writes=recv1} 1F0{reads=recv0} 1F1{reads=recv1}
"""

ACCUMULATOR = """
    rank 0: 0SCALE_GRAD{writes=sum} 0F0 0B0{reads=sum writes=sum} 0F1 0B1{reads=sum writes=sum} 0STEP{reads=sum}
"""

ADD_TO_SUM = "0SCALE_GRAD{reads=g+sum writes=sum}"
BUCKET = f"""
    rank 0: 0SCALE_GRAD{{writes=g}} 0SCALE_GRAD{{writes=sum}} 0F0 0B0{{reads=g writes=g}} {ADD_TO_SUM} \
            0SCALE_GRAD{{writes=g}} 0F1 0B1{{reads=g writes=g}} {ADD_TO_SUM} 0STEP{{reads=sum}}
"""

COUNT_OF_TOKENS = """
    group pp: 0 1
    rank 0: 0F0 0SEND_F0! 1BROADCAST0:pp{group=0 peer=1 writes=tokens}
    rank 1: 1RECV_F0! 1F0{writes=tokens} 1BROADCAST0:pp{group=0 peer=1 reads=tokens}
"""

REDUCED_ELSEWHERE = """
    group dp: 0 1
    rank 0: 0F0 0B0{writes=g} 0REDUCE_GRAD:dp{group=0 reads=g writes=h} 0STEP{reads=h}
    rank 1: 0F0 0B0{writes=g} 0REDUCE_GRAD:dp{group=0 reads=g writes=h} 0STEP{reads=h}
"""

SHARDS = """
    group dp: 0 1
    rank 0: 0F0 0B0 0REDUCE_GRAD:dp 0REDUCE_GRAD:dp/0.REDUCE_SCATTER:dp{group=0 range=0..16} 0STEP{range=0..8}
    rank 1: 0F0 0B0 0REDUCE_GRAD:dp 0REDUCE_GRAD:dp/0.REDUCE_SCATTER:dp{group=0 range=0..16} 0STEP{range=8..16}
"""

GATHERED_SHARDS = SHARDS
for shard in ("0..8", "8..16"):
    step = f"0STEP{{range={shard}}}"
    gather = f"0GATHER_WEIGHT:dp 0GATHER_WEIGHT:dp/0.ALL_GATHER:dp{{group=0 range={shard}}}"
    GATHERED_SHARDS = GATHERED_SHARDS.replace(step, f"{step} {gather}")

TWO_GROUPS = """
    group tp: 0 1
    group cp: 0 1
    rank 0: 0F0
    rank 1: 0F0
"""


CUT_WEIGHT = GradientFacts((Loss("main", 0),), (ParameterGradient("weight", (0,), sharded_over=("tp",)),))
CUT_OVER_TP = """
    group dp: 0 2
    group dp: 1 3
    rank 0: 0F0 0B0 0REDUCE_GRAD:dp{group=0 reduction=sum} 0STEP
    rank 1: 0F0 0B0 0REDUCE_GRAD:dp{group=1 reduction=sum} 0STEP
    rank 2: 0F0 0B0 0REDUCE_GRAD:dp{group=0 reduction=sum} 0STEP
    rank 3: 0F0 0B0 0REDUCE_GRAD:dp{group=1 reduction=sum} 0STEP
"""


def creating(*orders):
    """Two groups of the same two ranks, made by each rank in its order."""
    return lambda: dataclasses.replace(program(TWO_GROUPS), facts=Facts(group_creation=orders))


CASES = (
    Case("PP112", "a layer is left out", cut(*WHOLE), cut(WHOLE[0], WHOLE[1][1:]), kills=("PP112",)),
    Case("PP113", "a layer is on both stages", cut(*WHOLE), cut(WHOLE[0], ("layer.1", *WHOLE[1])), kills=("PP113",)),
    Case(
        "PP114",
        "two layers of a stage change places",
        cut(*WHOLE),
        cut(("embed", "layer.1", "layer.0"), WHOLE[1]),
        kills=("PP114",),
    ),
    Case(
        "PP118",
        "the loss is built on the last rank, and the last stage is on the first",
        with_loss_on(0),
        with_loss_on(1),
        kills=("PP118",),
    ),
    of_program("PP122", "a forward runs twice", "rank 0: 0F0 0B0", ("0F0", "0F0 0F0"), kills=("PP122",)),
    of_program("PP123", "W before I", "rank 0: 0F0 0I0 0W0", ("0I0 0W0", "0W0 0I0"), kills=("PP123",)),
    of_program(
        "PP129",
        "backwards of the splits of a sequence run in the order of its forwards",
        "rank 0: 0F0.s0 0F0.s1 0B0.s1 0B0.s0",
        ("0B0.s1 0B0.s0", "0B0.s0 0B0.s1"),
        kills=("PP129",),
    ),
    Case("PP124", "a forward of a tenth micro-batch of four", subject, with_a_stranger_s_forward, kills=("PP124",)),
    of_program(
        "PP125",
        "the second micro-batch is neither sent nor received",
        TWO_MICRO_BATCHES,
        (" 0SEND_F1{peer=1}", ""),
        (" WAIT(0SEND_F1)", ""),
        (" 1RECV_F1!{peer=0}", ""),
        kills=("PP125",),
    ),
    of_program(
        "PP126",
        "the receiver computes the sender's stage instead of its own",
        TWO_MICRO_BATCHES,
        ("1F0", "0F0"),
        ("1F1", "0F1"),
        kills=("PP126",),
    ),
    of_program(
        "PP127",
        "two stages of one rank run in the wrong order",
        "rank 0: 0F0 1F0 1B0 0B0",
        ("0F0 1F0", "1F0 0F0"),
        kills=("PP127",),
    ),
    of_program(
        "PP128",
        "one stage of two is not updated",
        "rank 0: 0F0 1F0 1B0 0B0 0STEP 1STEP",
        (" 1STEP", ""),
        kills=("PP128",),
    ),
    of_program(
        "PP144",
        "the gradient is halved by an attribute of the optimizer's row, which nothing reads",
        "rank 0: 0F0 0B0 0SCALE_GRAD{scale=1/2} 0STEP",
        (" 0SCALE_GRAD{scale=1/2} 0STEP", " 0STEP{scale=1/2}"),
        kills=("PP144",),
    ),
    Case(
        "PP145",
        "a forward that alternates with a backward sends its output before its last part",
        alternating,
        sent_too_early,
        kills=("PP145",),
    ),
    Case(
        "PP207",
        "layers are described without the first collective of their backward",
        lambda: with_layers(lambda layer: layer),
        lambda: with_layers(
            lambda layer: dataclasses.replace(layer, backward_collectives=layer.backward_collectives[1:])
        ),
        kills=("PP207",),
    ),
    Case(
        "PP208",
        "all TP ranks leave out the same all-reduce",
        lambda: subject(topology={"tp": 2}),
        without_a_collective,
        kills=("PP208",),
    ),
    Case(
        "PP209",
        "the activation is declared invariant, and sequence parallelism cuts it",
        with_activation("sharded(s)"),
        with_activation("invariant"),
        kills=("PP209",),
    ),
    of_program(
        "PP301",
        "the second message is sent and never received, and nobody waits for it",
        TWO_MICRO_BATCHES,
        (" WAIT(0SEND_F1)", ""),
        ("1RECV_F1!{peer=0}", ""),
        kills=("PP301",),
    ),
    of_program(
        "PP305",
        "the sender's tensor is cut over TP, the receiver's is not",
        ONE_TENSOR,
        ("sent: shape=8x4 dtype=float32", "sent: shape=8x4 dtype=float32 placement=sharded(0)"),
        kills=("PP305",),
    ),
    of_program(
        "PP307",
        "a statistic of TP ranks is reduced over a group of another axis with the same members",
        AMAX,
        ("group tp", "group pp"),
        kills=("PP307",),
    ),
    of_program("PP308", "one rank is missing in the group", AMAX, ("tp: 0 1 2", "tp: 0 1"), kills=("PP308",)),
    Case(
        "PP310",
        "one rank makes the groups in another order",
        creating((0, 1), (0, 1)),
        creating((0, 1), (1, 0)),
        kills=("PP310",),
    ),
    Case(
        "PP311",
        "each first stage sends to the second stage of the other replica",
        lambda: subject(topology={"dp": 2}),
        with_crossed_replicas,
        kills=("PP311",),
    ),
    of_program(
        "PP312",
        "a transposed view is sent as it lies in memory",
        ONE_TENSOR,
        ("strides=4x1", "strides=1x8"),
        kills=("PP312",),
    ),
    of_program(
        "PP313",
        "the shape of the second micro-batch is not announced, and the first one's is kept",
        ANNOUNCED,
        (" 0SEND_META_F1!{tensor=1}", ""),
        (" 1RECV_META_F1!", ""),
        kills=("PP313",),
    ),
    Case(
        "PP314",
        "the shape of one micro-batch is neither sent nor received",
        exchanging_shapes,
        lambda: changed(exchanging_shapes(), lambda row: None if "META_F1" in str(row.op) else row),
        kills=("PP314",),
    ),
    of_program(
        "PP315",
        "the second tensor's receive is posted while its shape is still under way",
        ANNOUNCED,
        (
            "1RECV_META_F1! 1RECV_F1!{tensor=1 range=0..64}",
            "1RECV_META_F1 1RECV_F1{tensor=1 range=0..64} WAIT(1RECV_META_F1) WAIT(1RECV_F1)",
        ),
        kills=("PP315",),
    ),
    Case(
        "PP316",
        "one send more than NCCL is known to take in a group call",
        in_one_group_call(256),
        in_one_group_call(257),
        kills=("PP316",),
    ),
    Case(
        "PP504",
        "one receive slot fewer than the smallest sufficient number",
        with_slots(3),
        with_slots(2),
        kills=("PP504",),
    ),
    of_program(
        "PP508",
        "a side stream still reads the activation when the next step begins",
        GATHER_ON_A_SIDE_STREAM,
        (" WAIT(0ALL_GATHER:tp)", ""),
        kills=("PP508",),
    ),
    of_program(
        "PP509", "both messages go into one slot before either is read", TWO_SLOTS, ("recv1", "recv0"), kills=("PP509",)
    ),
    Case(
        "PP217",
        "the results of experts come back in another order than they are taken for",
        combined(0, 1, 2, 3),
        combined(0, 2, 1, 3),
        kills=("PP217",),
    ),
    of_program(
        "PP510",
        "each forward computes from the slot of the other micro-batch",
        TWO_SLOTS,
        ("1F0{reads=recv0} 1F1{reads=recv1}", "1F0{reads=recv1} 1F1{reads=recv0}"),
        kills=("PP510",),
    ),
    of_program(
        "PP511",
        "the accumulator is set to zero between two micro-batches",
        ACCUMULATOR,
        (" 0F1", " 0SCALE_GRAD{writes=sum} 0F1"),
        kills=("PP511",),
    ),
    of_program(
        "PP512",
        "the count is broadcast by the first rank, which has not got it",
        COUNT_OF_TOKENS,
        ("0SEND_F0! 1BROADCAST0:pp{group=0 peer=1 writes", "0SEND_F0! 1BROADCAST0:pp{group=0 peer=0 reads"),
        ("1BROADCAST0:pp{group=0 peer=1 reads", "1BROADCAST0:pp{group=0 peer=0 writes"),
        kills=("PP512",),
    ),
    of_program(
        "PP513",
        "the optimizer reads the buffer from which the gradient was reduced",
        REDUCED_ELSEWHERE,
        ("0STEP{reads=h}", "0STEP{reads=g}"),
        kills=("PP513",),
    ),
    of_program(
        "PP514",
        "a bucket is added to the sum again without having been set to zero",
        BUCKET,
        ("0SCALE_GRAD{writes=g} 0F1", "0F1"),
        kills=("PP514",),
    ),
    of_program(
        "PP515",
        "the activations are reloaded without having been offloaded",
        ROUND_TRIP,
        (" WAIT(0F0){queue=offload} 0OFFLOAD0{queue=offload} WAIT(0OFFLOAD0) FREE(0OFFLOAD0)", ""),
        kills=("PP515",),
    ),
    of_program(
        "PP602",
        "the gradients are summed over the data-parallel ranks a second time",
        "rank 0: 0F0 0B0 0REDUCE_GRAD:dp 0STEP",
        ("0REDUCE_GRAD:dp", "0REDUCE_GRAD:dp 0REDUCE_GRAD:dp"),
        kills=("PP602",),
    ),
    of_scale(
        "PP603",
        "the weight's two halves are added to each other: its groups hold ranks of both",
        CUT_OVER_TP,
        CUT_WEIGHT,
        ("dp: 0 2", "dp: 0 3"),
        ("dp: 1 3", "dp: 1 2"),
        ("rank 2: 0F0 0B0 0REDUCE_GRAD:dp{group=0", "rank 2: 0F0 0B0 0REDUCE_GRAD:dp{group=1"),
        ("rank 3: 0F0 0B0 0REDUCE_GRAD:dp{group=1", "rank 3: 0F0 0B0 0REDUCE_GRAD:dp{group=0"),
        mesh=Mesh(("tp", "dp"), (2, 2)),
        kills=("PP603",),
    ),
    of_program(
        "PP604",
        "the gradients are reduced before the last micro-batch has added to them",
        "rank 0: 0F0 0F1 0B0 0B1 0REDUCE_GRAD:dp 0STEP",
        ("0B1 0REDUCE_GRAD:dp", "0REDUCE_GRAD:dp 0B1"),
        kills=("PP604",),
    ),
    of_program(
        "PP610",
        "a scale names a size that there is not",
        "rank 0: 0F0 0B0 0SCALE_GRAD{scale=1/dp} 0STEP",
        ("1/dp", "1/dpp"),
        kills=("PP610",),
    ),
    Case(
        "PP611",
        "no rank sums the norm, to which gradients are clipped, over the stages",
        lambda: clipped_over_stages(lambda row: row),
        lambda: clipped_over_stages(lambda row: None if str(row.op).endswith("ALL_REDUCE:pp") else row),
        kills=("PP611",),
    ),
    Case(
        "PP612",
        "each dp rank updates its share of the weights, and nothing gathers the others",
        lambda: subject(topology={"dp": 2}, memory={"shard_optimizer": "dp"}),
        lambda: changed(
            subject(topology={"dp": 2}, memory={"shard_optimizer": "dp"}),
            lambda row: None if "GATHER_WEIGHT" in str(row.op) else row,
        ),
        kills=("PP612",),
    ),
    Case(
        "PP613",
        "the sum of a norm's gradient is repeated at the end of its block",
        lambda: subject(topology={"dp": 2}),
        repeated_sum,
        kills=("PP613",),
    ),
    of_program(
        "PP614",
        "the optimizer's shards end at parameters, the shards of the reduce-scatter are equal",
        SHARDS,
        ("0STEP{range=0..8}", "0STEP{range=0..10}"),
        ("0STEP{range=8..16}", "0STEP{range=10..16}"),
        kills=("PP614",),
    ),
    of_program(
        "PP615",
        "each rank puts the other's elements into the gather",
        GATHERED_SHARDS,
        ("dp{group=0 range=0..8}", "dp{group=0 range=first}"),
        ("dp{group=0 range=8..16}", "dp{group=0 range=0..8}"),
        ("range=first", "range=8..16"),
        kills=("PP615",),
    ),
    Case(
        "PP701",
        "all forwards run before the first backward, and their activations do not fit the memory",
        with_budget("1f1b"),
        with_budget("gpipe"),
        kills=("PP701",),
    ),
    *RESHARDS,
)
