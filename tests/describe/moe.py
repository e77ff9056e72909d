"""A mixture of experts with TP (sequence parallel) and EP as a typed program: correct, and with bugs from practice."""

from pipeproof.stages.describe.type_rules import Reason
from pipeproof.stages.describe.typed_ops import ProgramBuilder

SIZES = {"s": 8, "h": 4, "f": 16, "e": 4, "c": 8, "k": 2, "n": 32}

BUGS = {
    "scores declared complete": (Reason.OPERAND, "y.addends"),  # torchtitan 2416, 4054
    "no exchange of slots": (Reason.OPERAND, "up.out"),
    "slots not brought back": (Reason.OPERAND, "y.addends"),
    "mask not cut": (Reason.SIDE_INPUT, "x.masked"),  # Megatron 5563
    "counts not reduced over tp": (Reason.OPERAND, "bias.step"),  # torchtitan 4154
    "addends taken for the sum": (Reason.RELABEL, "y"),  # torchtitan 3412
    "buffer cut along its slots": (Reason.OPERAND, "flat"),  # DeepSpeed 8195
}


def block(bug=""):
    """Tokens are cut over ep and, between layers, over tp; experts over ep, their inner dim over tp."""
    assert bug in ("", *BUGS)
    p = ProgramBuilder("moe", {"tp": 2, "ep": 2}, SIZES)
    p.input("x", "s h", tp="S(s)", ep="S(s)")
    p.constant("mask", "s", ep="S(s)", tp="I" if bug == "mask not cut" else "S(s)")
    p.parameter("router", "h e", reduced_over=["tp", "ep"])
    p.parameter("up", "e h f", tp="S(f)", ep="S(e)")
    p.parameter("down", "e f h", tp="S(f)", ep="S(e)")
    p.all_gather("all", p.multiply("x.masked", "x", "mask"), "tp")
    p.apply("scores", p.multiply("logits", "all", "router", over="h"), along="e")
    weights = p.select("top.scores", "scores", "e", "k")
    if bug == "scores declared complete":  # as if the way back of the scores were already summed
        p.input("top.complete", "s k", tp="I", ep="S(s)")
        weights = "top.complete"
    p.detach("top.ids", "top.scores")
    slots = p.dispatch("slots", "all", "top.ids", dim="s", into="e c")
    if bug != "no exchange of slots":
        slots = p.all_to_all("slots.own", slots, "ep", "e")
    if bug == "buffer cut along its slots":
        p.merge("flat", p.cut("slots.cut", slots, "tp", "c"), "e c", "n")
    p.apply("act", p.multiply("up.out", slots, "up", over="h"))
    out = p.multiply("down.out", "act", "down", over="f")
    if bug != "slots not brought back":
        out = p.all_to_all("slots.back", out, "ep", "c")
    p.combine("y.addends", out, "top.ids", p.multiply("weights", weights, over="k"), slot_dims="e c", dim="s")
    if bug == "addends taken for the sum":
        p.relabel("y", "y.addends", "tp", to="R")
        p.result("y", tp="R", ep="S(s)")
    else:
        p.reduce_scatter("y", "y.addends", "tp", "s")
        p.result("y", tp="S(s)", ep="S(s)")
    counts = p.multiply("counts", p.cut("ids.own", "top.ids", "tp", "s"), over="s")
    if bug != "counts not reduced over tp":
        counts = p.all_reduce("counts.tp", counts, "tp")
    p.apply("bias.step", p.all_reduce("counts.all", counts, "ep"))
    return p
