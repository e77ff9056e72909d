"""Contents by kind of operation: valid contents of a read buffer, contents after a write, names in a finding."""

import pytest

from tests.verify.test_contents import program, summary

TO_1, FROM_0 = "0F0 0SEND_F0{peer=1} WAIT(0SEND_F0) ", "1RECV_F0{peer=0} WAIT(1RECV_F0) "
BACK_TO_0 = "1SEND_B0{peer=0} WAIT(1SEND_B0) "
RESET, ADD_0, ADD_1 = "0SCALE_GRAD{writes=g} ", "0F0 0B0{reads=g writes=g} ", "0F1 0B1{reads=g writes=g} "
MIXTURE = "0F0{writes=a} 0B0{writes=g} 0SCALE_GRAD{reads=a+g writes=x} "


def senders(num):
    return "".join(f"0F{i} 0SEND_F{i}{{peer=1}} WAIT(0SEND_F{i}) " for i in range(num))


def chunks(names, *, gather=""):
    """A stage of rank 1 and a later one, whose forward reads ``r1``; ``names`` is on the receive of the later one."""
    first = " writes=r1" * (not gather)
    return program(
        f"{TO_1}2RECV_F0{{peer=1}} WAIT(2RECV_F0) 2F0 2SEND_F0{{peer=1}} WAIT(2SEND_F0)",
        f"1RECV_F0{{peer=0{first}}} WAIT(1RECV_F0) {gather}1F0 1SEND_F0{{peer=0}} WAIT(1SEND_F0) "
        f"3RECV_F0{{peer=0{names}}} WAIT(3RECV_F0) 3F0{{reads=r1}}",
        groups=["tp: 1"],
    )


def chunks_backward(names, *, gather=""):
    """The same for the backwards of rank 0, which has stages 0 and 2: the backward of stage 0 reads ``g2``."""
    first = " writes=g2" * (not gather)
    return program(
        f"{TO_1}2RECV_F0{{peer=1}} WAIT(2RECV_F0) 2F0 2SEND_F0{{peer=1}} WAIT(2SEND_F0) "
        f"2RECV_B0{{peer=1{first}}} WAIT(2RECV_B0) {gather}2B0 2SEND_B0{{peer=1}} WAIT(2SEND_B0) "
        f"0RECV_B0{{peer=1{names}}} WAIT(0RECV_B0) 0B0{{reads=g2}}",
        f"{FROM_0}1F0 1SEND_F0{{peer=0}} WAIT(1SEND_F0) 3RECV_F0{{peer=0}} WAIT(3RECV_F0) 3F0 3B0 "
        f"3SEND_B0{{peer=0}} WAIT(3SEND_B0) 1RECV_B0{{peer=0}} WAIT(1RECV_B0) 1B0 {BACK_TO_0}",
        groups=["tp: 0"],
    )


def sliced_gradient(cut, gathered):
    """A gradient that is sent in slices; the names that the slice and the gather read."""
    return program(
        f"{TO_1}0RECV_B0{{peer=1 writes=q}} WAIT(0RECV_B0) 0GATHER_B0{{group=0 reads={gathered} writes=r}} "
        "0B0{reads=r}",
        f"{FROM_0}1F0{{writes=k}} 1B0{{reads=k writes=gin}} 1SLICE_B0{{reads={cut} writes=p}} "
        "1SEND_B0{peer=0 reads=p} WAIT(1SEND_B0)",
        groups=["tp: 0"],
    )


def gradient_members(member):
    """A stage that sends on the gradient that it received; of several tensors that cross together it may."""
    tensors = "\n".join(f"tensor {tensor}: shape=4 dtype=float32{member}" for tensor in ("mask", "mask_out"))
    return f"{tensors}\n" + program(
        f"{TO_1}0RECV_B0{{peer=1 tensor=1 range=0..4}} WAIT(0RECV_B0) 0B0",
        f"{FROM_0}1F0 1SEND_F0{{peer=2}} WAIT(1SEND_F0) 1RECV_B0{{peer=2 tensor=0 range=0..4 writes=gm}} "
        "WAIT(1RECV_B0) 1B0{reads=gm writes=o} 1SEND_B0{peer=0 tensor=1 range=0..4 reads=gm} WAIT(1SEND_B0)",
        "2RECV_F0{peer=1} WAIT(2RECV_F0) 2F0 2B0 2SEND_B0{peer=1 tensor=0 range=0..4} WAIT(2SEND_B0)",
    )


def in_another_ranks_memory(*written):
    """Rank 1 computes into memory of rank 0, which reads it after a message: later, and on a lower rank."""
    names = [f"{{writes={name}@0}}" for name in written]
    return program(
        f"{senders(2)}2RECV_F0{{peer=1}} WAIT(2RECV_F0) 2F0{{reads=b0}} "
        "2RECV_F1{peer=1} WAIT(2RECV_F1) 2F1{reads=b1}",
        f"{FROM_0}1F0{names[0]} 1RECV_F1{{peer=0}} WAIT(1RECV_F1) 1F1{names[1]} "
        "1SEND_F0{peer=0} WAIT(1SEND_F0) 1SEND_F1{peer=0} WAIT(1SEND_F1)",
    )


def reduced(changes, read):
    """Two ranks of a data-parallel group that change a gradient, and the buffer that their optimizers read."""
    return program(
        *[f"0F0{{writes=n}} {RESET}0B0{{reads=g writes=g}} {changes} 0STEP{{reads={read}}}"] * 2, groups=["dp: 0 1"]
    )


CASES = {
    # name: (code, operations of the witnesses, wrong, right)
    "a backward reads a number that not all forwards have counted": (
        [("PP509", ["0F0", "0F1", "0B0"])],
        program("0F0{writes=n} 0F1{writes=n} 0B0{reads=n} 0B1"),
        program("0F0{writes=n} 0F1{reads=n writes=n} 0B0{reads=n} 0B1{reads=n}"),
    ),
    "a forward of a later stage starts from what another micro-batch left": (
        [("PP510", ["1F1", "1F0"])],
        program(senders(2), f"{FROM_0}1F0{{writes=n}} 1RECV_F1{{peer=0}} WAIT(1RECV_F1) 1F1{{reads=n}}"),
        program(f"{senders(2)}0RECV_B0{{peer=1}} WAIT(0RECV_B0) 0B0 0RECV_B1{{peer=1}} WAIT(0RECV_B1) 0B1",
                f"{FROM_0}1F0{{writes=n}} 1RECV_F1{{peer=0}} WAIT(1RECV_F1) 1F1{{reads=n writes=n}} "
                f"1B0{{reads=n}} {BACK_TO_0}1B1{{reads=n}} 1SEND_B1{{peer=0}} WAIT(1SEND_B1)"),
    ),
    "a forward reads a buffer from the start, and a number, but not its input": (
        [("PP510", ["1F1"])],
        program(senders(2), "1RECV_F0{peer=0 writes=r} WAIT(1RECV_F0) 1F0{reads=r writes=n} "
                            "1RECV_F1{peer=0 writes=s} WAIT(1RECV_F1) 1F1{reads=n+p writes=n}"),
        program(senders(2), "1RECV_F0{peer=0 writes=r} WAIT(1RECV_F0) 1F0{reads=r writes=n} "
                            "1RECV_F1{peer=0 writes=s} WAIT(1RECV_F1) 1F1{reads=n+p+s}"),
    ),
    "a forward computes from the sum of two micro-batches": (
        [("PP510", ["1F1", "0F1"])],
        program("0F0{writes=a} 0F1{reads=a writes=a} 1F0 1F1{reads=a}"),
        program("0F0{writes=a} 1F0{reads=a writes=b} 2F0{reads=a+b} 0F1{writes=a} 1F1{reads=a} 2F1"),
    ),
    "a backward adds to a sum of activations and gradients": (
        [("PP510", ["0B1", "0SCALE_GRAD"])],
        program(f"{MIXTURE}0F1 0B1{{reads=x writes=x}}"), program(f"{MIXTURE}0F1 0B1{{reads=g writes=g}}"),
    ),
    "a forward adds to a sum of activations and gradients": (
        [("PP510", ["0F1", "0SCALE_GRAD"])],
        program(f"{MIXTURE}0F1{{reads=x writes=x}} 0B1"), program(f"{MIXTURE}0F1{{reads=a writes=a}} 0B1"),
    ),
    "a weight gradient is written where it should be added": (
        [("PP511", ["0W1", "0STEP"])],
        program(f"{RESET}0F0 0I0 0W0{{reads=g writes=g}} 0F1 0I1 0W1{{writes=g}} 0STEP{{reads=g}}"),
        program(f"{RESET}0F0 0I0 0W0{{reads=g writes=g+h}} 0F1 0I1 0W1{{reads=g writes=g}} 0STEP{{reads=g}}"),
    ),
    "an input gradient does not come from the stage after": (
        [("PP510", ["0I0", "0F0"])],
        program("0F0{writes=a} 1F0{reads=a} 1I0{reads=a writes=gin} 1W0 0I0{reads=a} 0W0"),
        program("0F0{writes=a} 1F0{reads=a} 1I0{reads=a writes=gin} 1W0{reads=gin} 0I0{reads=gin} 0W0"),
    ),
    "a backward reads what its forward saved, and not the gradient": (
        [("PP510", ["0B0", "0F0"])],
        *(program("0F0{writes=k+o} 0SEND_F0{peer=1 reads=o} WAIT(0SEND_F0) 0RECV_B0{peer=1 writes=r} WAIT(0RECV_B0) "
                  f"0B0{{reads={names}}}", f"{FROM_0}1F0 1B0 {BACK_TO_0}") for names in ("k", "k+r")),
    ),
    "host memory of another micro-batch is reloaded": (
        [("PP510", ["0RELOAD0", "0OFFLOAD1"])],
        program("0F0{writes=k} 0OFFLOAD0{reads=k writes=h0} 0F1{writes=l} 0OFFLOAD1{reads=l writes=h1} "
                "0RELOAD0{reads=h1 writes=r} 0B0{reads=r} 0B1{reads=l}"),
        program("0F0{writes=k} 0OFFLOAD0{reads=k writes=h0} 0F1{writes=l} 0OFFLOAD1{reads=l writes=h1} "
                "0RELOAD0{reads=h0 writes=r} 0B0{reads=r} 0B1{reads=l}"),
    ),
    "a chunk reads the receive buffer of another chunk": (
        [("PP510", ["3F0", "1RECV_F0"])], chunks(""), chunks(" writes=r1"),
    ),
    "a chunk reads what another chunk gathered": (
        [("PP510", ["3F0", "1GATHER_F0"])], chunks("", gather="1GATHER_F0{group=0 writes=r1} "), chunks(" writes=r1"),
    ),
    "a chunk reads the gradient that another chunk received": (
        [("PP510", ["0B0", "2RECV_B0"])], chunks_backward(""), chunks_backward(" writes=g2"),
    ),
    "a chunk reads the gradient that another chunk gathered": (
        [("PP510", ["0B0", "2GATHER_B0"])],
        chunks_backward("", gather="2GATHER_B0{group=0 writes=g2} "), chunks_backward(" writes=g2"),
    ),
    "the input of a backward is cut in place of its gradient": (
        [("PP510", ["1SLICE_B0", "1F0"])], sliced_gradient("k", "q"), sliced_gradient("gin", "q"),
    ),
    "a gather reads a buffer that holds no slice": (
        [("PP510", ["0GATHER_B0"])], sliced_gradient("gin", "start"), sliced_gradient("gin", "q"),
    ),
    "of two gradients the one that is computed is passed on as it came": (
        [("PP510", ["1SEND_B0", "1RECV_B0"])], gradient_members(""), gradient_members(" member=mask"),
    ),
    "the sum of two gradients is sent": (
        [("PP509", ["1B0", "1B1", "1SEND_B0"])],
        *(program(f"{senders(2)}0RECV_B0{{peer=1}} WAIT(0RECV_B0) 0B0 0RECV_B1{{peer=1}} WAIT(0RECV_B1) 0B1",
                  f"{FROM_0}1F0 1RECV_F1{{peer=0}} WAIT(1RECV_F1) 1F1 1B0{{writes=g}} 1B1{{reads=g writes=g}} "
                  f"1SEND_B0{{peer=0{name}}} 1SEND_B1{{peer=0}} WAIT(1SEND_B0) WAIT(1SEND_B1)")
          for name in (" reads=g", "")),
    ),
    "zeros are sent, and the output has no name": (
        [("PP510", ["0SEND_F0", "0SCALE_GRAD"])],
        *(program(f"0F0 0SCALE_GRAD{{writes=z}} 0SEND_F0{{peer=1 reads={name}}} WAIT(0SEND_F0)", f"{FROM_0}1F0")
          for name in ("z", "start")),
    ),
    "weights are gathered into a sum by a forward": (
        [("PP510", ["0B1", "0F1/0.ALL_GATHER:tp"])],
        *(program(f"0F0 0B0{{writes=g}} 0F1 0F1/0.ALL_GATHER:tp{{group=0 writes={name}}} 0B1{{reads=g+w writes=g}}",
                  groups=["tp: 0"]) for name in ("g", "w")),
    ),
    "another rank computes both micro-batches into one buffer": (
        [("PP509", ["1F0", "1F1", "2F0"])], in_another_ranks_memory("b0", "b0"), in_another_ranks_memory("b0", "b1"),
    ),
    "another rank computes the micro-batches into the memory of each other": (
        [("PP510", ["2F0", "1F1"]), ("PP510", ["2F1", "1F0"])],
        in_another_ranks_memory("b1", "b0"), in_another_ranks_memory("b0", "b1"),
    ),
    "a backward that names nothing adds to another memory than the optimizer reads": (
        [("PP511", ["0B1", "0STEP"])],
        program(f"{RESET}{ADD_0}0F1 0B1 0STEP{{reads=g}}"), program(f"{RESET}{ADD_0}{ADD_1}0STEP{{reads=g}}"),
    ),
    "the sum is set to zero before the optimizer": (
        [("PP511", ["0SCALE_GRAD", "0STEP"])],
        program(f"{RESET}{ADD_0}{RESET}0STEP{{reads=g}}"), program(f"{RESET}{ADD_0}0STEP{{reads=g}} {RESET}"),
    ),
    "the sum is set to zero twice between micro-batches": (
        [("PP511", ["0SCALE_GRAD", "0STEP"])],
        program(f"{RESET}{ADD_0}{RESET}{RESET}{ADD_1}0STEP{{reads=g}}"),
        program(f"{RESET}{RESET}{RESET}{ADD_0}{ADD_1}0STEP{{reads=g}}"),
    ),
    "the optimizer reads the gradient of another stage": (
        [("PP510", ["1STEP", "0B0"])],
        program("0F0 1F0 1B0{writes=g1} 0B0{writes=g0} 0STEP{reads=g0} 1STEP{reads=g0}"),
        program("0F0 1F0 1B0{writes=g1} 0B0{writes=g0} 0STEP{reads=g0} 1STEP{reads=g1}"),
    ),
    "the optimizer reads the gradient of the input": (
        [("PP511", ["1B0", "1STEP"])],
        *(program(f"0F0 1F0 {RESET}1B0{{reads=g writes=g+gin}} 0B0{{reads=gin}} 0STEP 1STEP{{reads={name}}}")
          for name in ("gin", "g")),
    ),
    "an input is overwritten twice before its reader comes": (
        [("PP509", ["1RECV_F0", "1RECV_F2", "1F0"])],
        program(senders(3), "1RECV_F0{peer=0 writes=r} WAIT(1RECV_F0) 1RECV_F1{peer=0 writes=r} WAIT(1RECV_F1) "
                            "1RECV_F2{peer=0 writes=r} WAIT(1RECV_F2) 1F0{reads=r} 1F1 1F2"),
        program(senders(3), "1RECV_F0{peer=0 writes=r} WAIT(1RECV_F0) 1RECV_F1{peer=0 writes=s} WAIT(1RECV_F1) "
                            "1RECV_F2{peer=0 writes=s} WAIT(1RECV_F2) 1F0{reads=r} 1F1 1F2"),
    ),
    "a gradient was where a backward reads what its forward saved": (
        [("PP510", ["0B1", "0F2"])],
        program("0F0 0B0{writes=x} 0F1 0F2{writes=x} 0B1{reads=x} 0B2"),
        program("0F0 0B0{writes=x} 0F2 0F1{writes=x} 0B1{reads=x} 0B2"),
    ),
    "a reduction names nothing that it writes": (
        [("PP513", ["0STEP", "0REDUCE_GRAD:dp"])] * 2,
        reduced("0REDUCE_GRAD:dp{group=0 reads=g+n}", "g"), reduced("0REDUCE_GRAD:dp{group=0 writes=g}", "g"),
    ),
    "of two changes of a gradient the second one is not read": (
        [("PP513", ["0STEP", "0SCALE_GRAD"])] * 2,
        *(reduced("0REDUCE_GRAD:dp{group=0 reads=g writes=h} 0SCALE_GRAD{reads=h writes=k}", name) for name in "hk"),
    ),
    "the optimizer reads what the collectives of a reduction have read": (
        [("PP513", ["0STEP", "0REDUCE_GRAD:dp"])] * 2,
        *(reduced("0REDUCE_GRAD:dp{reads=g} 0REDUCE_GRAD:dp/0.ALL_REDUCE:dp{group=0 reads=g writes=h}", name)
          for name in "gh"),
    ),
    "a bucket is added to what was there from the start, and the next micro-batch adds elsewhere": (
        [("PP511", ["0B1", "0STEP"])],
        *(program(f"{RESET}{ADD_0}0SCALE_GRAD{{reads=g+start writes=h}} 0F1 0B1{{{names}}} 0STEP{{reads=h}}")
          for names in ("writes=l", "reads=h writes=h")),
    ),
    "another micro-batch reads what was freed": (
        [("PP503", ["FREE(0F0)", "0B1"])],
        *(program(f"0F0{{writes=k}} 0F1{{writes=l}} 0B0{{reads=k}} FREE(0F0) 0B1{{reads={name}}}") for name in "kl"),
    ),
    "a weight gradient is computed from what another micro-batch saved": (
        [("PP510", ["0W0", "0F1"])],
        *(program(f"0F0{{writes=k}} 0F1{{writes=l}} 0I0 0W0{{reads={name}}} 0I1 0W1{{reads=l}}") for name in "lk"),
    ),
}  # fmt: skip
"""Mistake, its findings, the program, and a correct program close to it."""


@pytest.mark.parametrize("name", CASES)
def test_a_wrong_content_is_found_at_its_reader(name):
    expected, wrong, _ = CASES[name]
    assert summary(wrong) == expected


@pytest.mark.parametrize("name", CASES)
def test_the_correct_program_near_it_passes(name):
    assert summary(CASES[name][2]) == []


@pytest.mark.parametrize(
    "right",
    [
        program("0ALL_GATHER:dp{group=0 writes=w} 0F0{reads=w writes=w} 0B0{reads=w}", groups=["dp: 0"]),
        program("0ALL_GATHER:dp{group=0 writes=w} 0F0{reads=w} 0B0{reads=w}", groups=["dp: 0"]),
        program("0F0{writes=o} 0SLICE_F0{reads=o writes=p} 0SEND_F0{peer=1 reads=p} WAIT(0SEND_F0)", f"{FROM_0}1F0"),
        program(f"{TO_1}0RECV_B0{{peer=1}} WAIT(0RECV_B0) 0B0", "1RECV_F0{peer=0 writes=x} WAIT(1RECV_F0) 1F0{reads=x} "
                f"1B0{{reads=x}} {BACK_TO_0}"),
    ],
    ids=["weights in a table of all", "gathered weights", "a slice of a named output", "an input that is kept"],
)  # fmt: skip
def test_what_a_kind_may_find_is_let_pass(right):
    assert summary(right) == []


def test_a_sum_that_is_already_wrong_is_not_compared():
    """The backward of the second micro-batch sees weights, not the sum: that is one mistake."""
    text = program(f"{RESET}{ADD_0}0SCALE_GRAD{{reads=g}} 0ALL_GATHER:dp{{group=0 writes=g}} {ADD_1}0STEP{{reads=g}}")
    assert [code for code, _ in summary(f"group dp: 0\n{text}")] == ["PP510"]


def test_a_deadlock_leaves_contents_in_the_order_of_the_program():
    """A wait for each other on ranks that name no buffers, next to a buffer that another rank has written."""
    text = in_another_ranks_memory("b0", "b1")
    stuck = [
        f"rank {rank}: {mine}RECV_F2{{peer={other}}} WAIT({mine}RECV_F2) {mine}F2 {mine}SEND_F2{{peer={other}}} "
        f"WAIT({mine}SEND_F2)"
        for rank, other, mine in ((2, 3, 1), (3, 2, 0))
    ]
    assert "PP401" in {code for code, _ in summary("\n".join([text, *stuck]))}


# --- the numbers and names in a finding ---


SENDS = "0SEND_F0{{peer=1}} 0SEND_F1{{peer=1 reads={sent}}} WAIT(0SEND_F0) WAIT(0SEND_F1)"
RECEIVES = "1RECV_F0{peer=0} WAIT(1RECV_F0) 1F0 1RECV_F1{peer=0} WAIT(1RECV_F1) 1F1"


def test_a_sum_of_forwards_is_a_number_and_no_tensor_that_crosses():
    adds = "0F0{writes=a} 0F1{reads=a writes=a+b} "
    assert summary(program(adds + SENDS.format(sent="a"), RECEIVES)) == [("PP510", ["0SEND_F1", "0F1"])]
    assert summary(program(adds + SENDS.format(sent="b"), RECEIVES)) == []
