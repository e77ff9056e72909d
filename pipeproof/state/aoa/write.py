"""Statements as text, which is read back as the same statements."""

from __future__ import annotations

from pipeproof.state.aoa.syntax import Name, Program, Statement


def write_statements(program: Program) -> str:
    """One a line."""
    return "".join(f"{written(statement)}\n" for statement in program.statements)


def written(statement: Statement) -> str:
    """One statement."""
    sides = (", ".join(map(written_name, side)) for side in (statement.left, statement.right))
    return ", ".join([" -> ".join(sides), *_attributes(statement)])


def written_name(name: Name) -> str:
    """One name."""
    numbers = "" if name.numbers is None else "[{}:{}]".format(*name.numbers)
    return name.text + numbers + ("^T" if name.transposed else "")


def _attributes(statement: Statement) -> list[str]:
    words: list[str] = []
    if statement.fused is not None:
        words.append(statement.fused.kind)
        if statement.fused.num_heads:
            words.append(f"num_heads={statement.fused.num_heads}")
            words.append(f"num_key_value_groups={statement.fused.num_groups}")
    if statement.axis is not None:
        words.append(f"axis={statement.axis}")
    if statement.permutation is not None:
        words.append(f'permute="{list(statement.permutation)}"')
    if statement.cast is not None and statement.cast.source is None:
        words.append(f'dtype="{statement.cast.target}"')
    elif statement.cast is not None:
        words.append(f'src_dtype="{statement.cast.source}"')
        words.append(f'dst_dtype="{statement.cast.target}"')
    return words
