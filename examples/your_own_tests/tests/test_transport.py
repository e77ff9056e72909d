"""The reason to keep slices off: their effect on the layouts of this project."""

from pipeproof import check, plan_from_dict

MODEL = {"kind": "gpt", "num_layers": 2, "hidden_size": 64, "num_heads": 4, "ffn_size": 64, "vocab_size": 64,
         "seq_length": 32}  # fmt: skip
SCHEDULE = {"kind": "1f1b", "num_micro_batches": 2, "micro_batch_size": 2}


def errors(way, *, sequence_parallel):
    topology = {"pp": 2, "tp": 2, "sequence_parallel": sequence_parallel}
    plan = {"pipeproof": 1, "model": MODEL, "topology": topology, "schedule": SCHEDULE, "transport": way}
    return check(plan_from_dict(plan)).errors


def test_with_sequence_parallelism_only_whole_tensors_arrive():
    assert errors("full", sequence_parallel=True) == ()
    lossy = errors("partial", sequence_parallel=True)[0]
    assert "`partial` delivers 2048 of 4096 elements wrongly" in lossy.message
    first = lossy.witness.lost[0]
    assert (first.rank, first.source_rank, first.start, first.stop) == (2, 0, 1024, 2048)


def test_without_it_slices_are_right():
    assert errors("partial", sequence_parallel=False) == ()
