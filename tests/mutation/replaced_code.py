"""The code of a mutant for functions that are loaded: a process that has imported everything needs no new import."""

import ast
import gc
import inspect
from types import CodeType, FunctionType


def loaded_functions(paths):
    """The functions of each of the loaded files, by the code that they were made from: qualified name and line."""
    found = {path: {} for path in paths}
    by_name = {str(path): functions for path, functions in found.items()}
    for thing in gc.get_objects():
        if isinstance(thing, FunctionType) and thing.__code__.co_filename in by_name:
            by_name[thing.__code__.co_filename].setdefault(_key(thing.__code__), []).append(thing)
    return found


def replaced_code(path, source, mutant, functions):
    """Pairs of a function and its code in the mutant; empty if the change is not in functions that are loaded alone.

    ``functions`` are the ``loaded_functions`` of the file, and ``source`` is its text.
    """
    original = _outer_functions(compile(source, str(path), "exec"))
    plain = compile(ast.unparse(ast.parse(source)), str(path), "exec")  # the mutant with its lines, but for the change
    changed = compile(mutant.source, str(path), "exec")
    before, after = _outer_functions(plain), _outer_functions(changed)
    if not len(original) == len(before) == len(after) or not _only_functions_differ(plain, changed):
        return []
    pairs = []
    for old, left, right in zip(original, before, after, strict=True):
        if left == right:
            continue
        replaced = _with_closures(old, left, right, functions)
        if not functions.get(_key(old)) or any(code.co_freevars != f.__code__.co_freevars for f, code in replaced):
            return []
        pairs += replaced
    return pairs


def _with_closures(old, left, right, functions):
    """Pairs of a function that differs, and of the functions in it that calls before now have made and that differ."""
    pairs = [(function, right) for function in functions.get(_key(old), [])]
    inner = [_outer_functions(code) for code in (old, left, right)]
    if len({*map(len, inner)}) == 1:
        for codes in zip(*inner, strict=True):
            pairs += _with_closures(*codes, functions) if codes[1] != codes[2] else []
    return pairs


def _key(code):
    return code.co_qualname, code.co_firstlineno


def _outer_functions(code):
    """The functions that code of a module or class defines, those of functions left out; in the order of the code."""
    found = []
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found += [constant] if constant.co_flags & inspect.CO_OPTIMIZED else _outer_functions(constant)
    return found


def _only_functions_differ(left, right):
    """True if two modules or classes run the same when they are imported, but for the functions that they define."""
    if left.co_code != right.co_code or left.co_names != right.co_names:
        return False
    for a, b in zip(left.co_consts, right.co_consts, strict=True):
        if not isinstance(a, CodeType):
            if a != b or type(a) is not type(b):
                return False
        elif not a.co_flags & inspect.CO_OPTIMIZED and not _only_functions_differ(a, b):
            return False
    return True
