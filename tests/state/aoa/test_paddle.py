"""Random programs: our map equals numpy and Paddle's own engine."""

import pytest
from hypothesis import given, settings

from pipeproof.state.aoa.aoa_engine import program_map
from pipeproof.state.aoa.inverse import inverse
from pipeproof.state.aoa.statements import write_statements
from tests.state.aoa.arrays import apply_map, apply_map_with_paddle, engine, numbers, program, same
from tests.state.aoa.programs import programs


@settings(max_examples=150, deadline=None)
@given(programs())
def test_a_map_makes_what_numpy_makes(drawn):
    made, _ = apply_map(program_map(program(*drawn.lines), drawn.source, drawn.target), drawn.before)
    assert same(made, drawn.after)


@pytest.mark.needs_paddle
@settings(max_examples=150, deadline=None)
@given(programs())
def test_a_map_makes_what_paddles_engine_makes_cast_by_cast(drawn):
    ours, our_casts = apply_map(program_map(program(*drawn.lines), drawn.source, drawn.target), drawn.before)
    theirs, their_casts = apply_map_with_paddle(engine(drawn.lines, drawn.source, drawn.target), drawn.before)
    assert same(ours, theirs)
    assert same(our_casts, their_casts)


@settings(max_examples=100, deadline=None)
@given(programs(casts=False, removes=False))
def test_the_inverse_makes_the_source_again(drawn):
    back = inverse(program(*drawn.lines), drawn.source, drawn.target)
    made, _ = apply_map(program_map(back, drawn.target, drawn.source), drawn.after)
    assert same(made, drawn.before)


@pytest.mark.needs_paddle
@settings(max_examples=60, deadline=None)
@given(programs(casts=False, removes=False, uneven=False))
def test_the_inverse_does_what_paddle_does_in_reverse_and_paddle_reads_it(drawn):
    lines = write_statements(inverse(program(*drawn.lines), drawn.source, drawn.target)).splitlines()
    arrays = numbers(drawn.target)
    ours, _ = apply_map(program_map(program(*lines), drawn.target, drawn.source), arrays)
    read_by_paddle, _ = apply_map_with_paddle(engine(lines, drawn.target, drawn.source), arrays, drawn.source)
    assert same(ours, read_by_paddle)
    if any("fused_qkv_old" in line or "gate, up" in line for line in drawn.lines):
        return  # Paddle's reverse knows no such names: see test_differences.py
    reverse = engine(drawn.lines, drawn.target, drawn.source, aoa_config_reverse=True)
    by_paddle, _ = apply_map_with_paddle(reverse, arrays, drawn.source)
    assert same(ours, by_paddle)
