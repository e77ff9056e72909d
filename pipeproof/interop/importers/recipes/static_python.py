"""Static evaluation of a function that builds a configuration: assignments, literals, calls of functions in files.

Nothing is imported or run. The result of what is not understood is unknown; where a branch depends on an unknown value,
everything that one of its sides would set is unknown. A call that gets the configuration and whose function is not
found ends the evaluation, because it may change any part.
"""

from __future__ import annotations

import ast
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NoReturn

from pipeproof.diagnostics.rule_doc import RuleDoc
from pipeproof.diagnostics.source import PlanFileError, SourceMap
from pipeproof.interop.importers.import_codes import REFUSED, UNREADABLE
from pipeproof.interop.importers.recipes.modules import Module, Modules
from pipeproof.interop.importers.recipes.static_values import (
    Function,
    Method,
    Missing,
    Placed,
    Record,
    Unknown,
    is_known,
    records_in,
)

_MAX_DEPTH: Final = 40
_MAX_STEPS: Final = 500_000
_MAX_SIZE: Final = 100_000
"""Longest list or text of an expression."""


def _range(*ends: int) -> list[int]:
    """Return the numbers of a range; ValueError for more than ``_MAX_SIZE``, which makes the result unknown."""
    numbers = range(*ends)
    if numbers[_MAX_SIZE:]:
        message = f"a range of more than {_MAX_SIZE} numbers"
        raise ValueError(message)
    return list(numbers)


_BINARY: Final[Mapping[type[ast.operator], Callable[[Any, Any], Any]]] = MappingProxyType(
    {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
     ast.Div: operator.truediv, ast.Mod: operator.mod}
)  # fmt: skip
_COMPARE: Final[Mapping[type[ast.cmpop], Callable[[Any, Any], Any]]] = MappingProxyType(
    {ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
     ast.GtE: operator.ge, ast.In: lambda a, b: a in b, ast.NotIn: lambda a, b: a not in b}
)  # fmt: skip
_BUILTINS: Final[Mapping[str, Callable[..., Any]]] = MappingProxyType(
    {"len": len, "min": min, "max": max, "int": int, "float": float, "str": str, "bool": bool, "abs": abs,
     "dict": dict, "list": list, "tuple": tuple, "sum": sum, "range": _range}
)  # fmt: skip
_OF_TEXTS: Final = frozenset({"lower", "upper", "strip", "startswith", "endswith", "split", "replace"})
_OF_MAPPINGS: Final = frozenset({"get", "items", "keys", "values", "pop", "update"})
_OF_LISTS: Final = frozenset({"append", "extend"})


class _ReturnedError(Exception):
    def __init__(self, value: Any) -> None:
        self.value = value


class _RaisedError(Exception):
    def __init__(self, node: ast.stmt, module: Module) -> None:
        self.node, self.module = node, module


class Evaluator:
    """Evaluates functions of modules."""

    def __init__(self, modules: Modules) -> None:
        self.modules = modules
        self._steps = 0
        self._depth = 0
        self._constants: dict[tuple[str, str], Any] = {}

    def result(self, module: Module, name: str) -> Any:
        """Return what a function of a module returns when it is called without arguments.

        Raises:
            PlanFileError: PP170, the function gets its configuration from, or gives it to, code that is not found, or
                is too long; PP171, it raises an exception.
        """
        node = module.definitions[name]
        assert isinstance(node, ast.FunctionDef), "a factory is a function"
        try:
            return self._run(node, module, (), {})
        except _RaisedError as error:
            self.refuse("this recipe raises an exception", error.module, error.node, code=REFUSED)
        except RecursionError:
            self.refuse("the code is nested too deeply", module, node)

    def refuse(
        self, message: str, module: Module, node: ast.AST, help: str | None = None, code: RuleDoc = UNREADABLE
    ) -> NoReturn:
        """End the evaluation.

        Raises:
            PlanFileError: always.
        """
        raise PlanFileError(
            code.finding(message, module.location(node), help), source=SourceMap(module.file, module.lines)
        )

    def _run(self, node: ast.FunctionDef, module: Module, args: Sequence[Any], named: Mapping[str, Any]) -> Any:
        if self._depth >= _MAX_DEPTH:
            self.refuse("calls are nested too deeply", module, node)
        frame = _Frame(self, module, dict(_bound(self, node, module, args, named)))
        self._depth += 1
        try:
            frame.block(node.body)
        except _ReturnedError as returned:
            return returned.value
        finally:
            self._depth -= 1
        return None

    def step(self, module: Module, node: ast.AST) -> None:
        """Count a step; refuse code that takes too many."""
        self._steps += 1
        if self._steps > _MAX_STEPS:
            self.refuse(f"the recipe takes more than {_MAX_STEPS} steps", module, node)

    def of_module(self, module: Module, name: str) -> Any:
        """Return what a name means at the top level of a module."""
        if name in module.definitions:
            return Function(module.definitions[name], module.file)
        if name in module.assignments:
            key = module.file, name
            if key not in self._constants:
                self._constants[key] = Unknown("defined by itself", module.location(module.assignments[name]))
                self._constants[key] = _Frame(self, module, {}).value(module.assignments[name])
            return self._constants[key]
        if name in module.imports:
            source, original = module.imports[name]
            found = self.modules.find(source, module.file)
            if original and found is None:
                return Missing(original, source)
            if original and found is not None:
                return self.of_module(found, original)
            return Missing(name, source)
        for source in module.stars:
            found = self.modules.find(source, module.file)
            inner = Missing(name, source) if found is None else self.of_module(found, name)
            if not isinstance(inner, Missing):
                return inner
        return Missing(name, "")

    def call(self, called: Any, args: list[Any], named: dict[str, Any], module: Module, node: ast.Call) -> Any:
        """Return the result of a call."""
        location = module.location(node)
        name = ast.unparse(node.func)
        match called:
            case Function(node=ast.FunctionDef(name="field"), module=file) if Path(file).name == "dataclasses.py":
                factory = named.get("default_factory")
                return named.get("default") if factory is None else self.call(factory, [], {}, module, node)
            case Function(node=ast.FunctionDef() as function, module=file):
                return self._run(function, self.modules.read(Path(file)), args, named)
            case Function(node=ast.ClassDef() as definition, module=file):
                record = Record(definition.name, location, arguments=tuple(args))
                self._defaults(definition, self.modules.read(Path(file)), record, 0)
                record.attributes.update(_keywords(node, named, module))
                return record
            case Method(owner=Function(node=ast.ClassDef() as outer, module=file), name=inner) if inner[:1].isupper():
                return self._of_inner_class(outer, file, Record(name, location, arguments=tuple(args)),
                                            _keywords(node, named, module), inner)  # fmt: skip
            case Method(owner=owner, name=method):
                return _of_value(owner, method, args, named, Record(name, location, arguments=tuple(args)))
            case Missing(name="getattr") if len(args) >= 2 and isinstance(args[0], Record) and isinstance(args[1], str):
                placed = args[0].get(args[1])
                return args[0].below(args[1], location) if placed is None else placed.value
            case Missing(name="setattr") if len(args) == 3 and isinstance(args[0], Record) and isinstance(args[1], str):
                args[0].attributes[args[1]] = Placed(args[2], module.location(node.args[2]))
                return None
            case Missing(name=builtin, module="") if builtin in _BUILTINS and is_known(args) and is_known(named):
                try:
                    return _BUILTINS[builtin](*args, **named)
                except (TypeError, ValueError):
                    return Unknown(f"the result of {name}", location)
            case Missing(name=missing, module=source):
                simple = missing.lstrip("_")[:1]
                if source and not simple.isupper() and _may_change(args, named, source):
                    self.refuse(
                        f"`{name}` may change the configuration, and `{source}` is not found",
                        module, node, "give the file inside of a checkout of its package, or install the package",
                    )  # fmt: skip
                record = Record(name, location, arguments=tuple(args))
                record.attributes.update(_keywords(node, named, module))
                return record if source or simple.isupper() else Unknown(f"the result of {name}", location)
        return Record(name, location, arguments=tuple(args))

    def _of_inner_class(self, outer: ast.ClassDef, file: str, record: Record, attributes: Mapping[str, Placed],
                        name: str) -> Record:  # fmt: skip
        """Return an object of a class inside of another one; without that class, it has the arguments of the call."""
        definition = next((one for one in outer.body if isinstance(one, ast.ClassDef) and one.name == name), None)
        if definition is not None:
            self._defaults(definition, self.modules.read(Path(file)), record, 0)
        record.attributes.update(attributes)
        return record

    def _defaults(self, node: ast.ClassDef, module: Module, record: Record, depth: int) -> None:
        """Set the attributes that a class and its bases give with a value."""
        for base in node.bases if depth < _MAX_DEPTH else ():
            called = _Frame(self, module, {}).value(base)
            if isinstance(called, Function) and isinstance(called.node, ast.ClassDef):
                self._defaults(called.node, self.modules.read(Path(called.module)), record, depth + 1)
        frame = _Frame(self, module, {})
        for statement in node.body:
            match statement:
                case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                    record.attributes[name] = Placed(frame.value(value), module.location(value))
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    record.attributes[name] = Placed(frame.value(value), module.location(value))


def _may_change(args: list[Any], named: dict[str, Any], module: str) -> bool:
    """True if a function of a module that is not found gets a configuration: an object with attributes, or of one."""
    if module.partition(".")[0] in sys.stdlib_module_names:
        return False
    return any(record.attributes or record.is_unset for record in records_in([args, named]))


def _keywords(node: ast.Call, named: Mapping[str, Any], module: Module) -> dict[str, Placed]:
    """Return the named arguments of a call as attributes."""
    places = {keyword.arg: module.location(keyword.value) for keyword in node.keywords if keyword.arg is not None}
    return {name: Placed(value, places.get(name, module.location(node))) for name, value in named.items()}


def _bound(
    evaluator: Evaluator, node: ast.FunctionDef, module: Module, args: Sequence[Any], named: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Yield the parameters of a call with their values."""
    parameters = [*node.args.posonlyargs, *node.args.args]
    frame = _Frame(evaluator, module, {})
    defaults = dict(zip([one.arg for one in parameters][::-1], node.args.defaults[::-1], strict=False))
    defaults |= {
        one.arg: value
        for one, value in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
        if value is not None
    }
    rest = dict(named)
    for index, parameter in enumerate([*parameters, *node.args.kwonlyargs]):
        name = parameter.arg
        if index < min(len(args), len(parameters)):
            yield name, args[index]
        elif name in rest:
            yield name, rest[name]
        elif name in defaults:
            yield name, frame.value(defaults[name])
        else:
            yield name, Unknown(f"the argument `{name}`, which has no default", module.location(parameter))
        rest.pop(name, None)
    if node.args.kwarg is not None:
        yield node.args.kwarg.arg, rest
    if node.args.vararg is not None:
        yield node.args.vararg.arg, tuple(args[len(parameters) :])


def _of_value(owner: Any, name: str, args: list[Any], named: dict[str, Any], result: Record) -> Any:
    """Return the result of a method; of an object that is not read, a record with the arguments of that object."""
    is_plain = is_known(args) and not named
    if isinstance(owner, str) and name in _OF_TEXTS and is_plain:
        return getattr(owner, name)(*args)
    if (isinstance(owner, dict) and name in _OF_MAPPINGS) or (isinstance(owner, list) and name in _OF_LISTS):
        try:
            value = getattr(owner, name)(*args, **named)
        except (KeyError, TypeError):
            return Unknown(f"the result of {result.name}", result.location)
        return list(value) if name in ("items", "keys", "values") else value
    if isinstance(owner, Record):
        result.arguments = owner.arguments or result.arguments
        return result
    return result if isinstance(owner, Function | Missing) else Unknown(f"the result of {result.name}", result.location)


class _Frame:
    """Names of a call."""

    def __init__(self, evaluator: Evaluator, module: Module, names: dict[str, Any]) -> None:
        self.evaluator = evaluator
        self.module = module
        self.names = names

    def block(self, body: Sequence[ast.stmt]) -> None:
        for statement in body:
            self.statement(statement)

    def statement(self, node: ast.stmt) -> None:
        self.evaluator.step(self.module, node)
        match node:
            case ast.Return(value=value):
                raise _ReturnedError(None if value is None else self.value(value))
            case ast.Raise():
                raise _RaisedError(node, self.module)
            case ast.Assign(targets=targets, value=value):
                result = self.value(value)
                for target in targets:
                    self.assign(target, result, value)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self.assign(target, self.value(value), value)
            case ast.AugAssign(target=target, op=op, value=value):
                read = ast.copy_location(ast.parse(ast.unparse(target), mode="eval").body, target)
                self.assign(target, self.binary(op, self.value(read), self.value(value), node), value)
            case ast.Expr(value=value):
                self.value(value)
            case ast.If(test=test, body=body, orelse=orelse):
                self.branch(test, body, orelse)
            case ast.With(body=body) | ast.Try(body=body):
                self.block(body)
            case ast.For(target=target, iter=iterated, body=body):
                self.loop(target, self.value(iterated), body, node)
            case ast.While(test=test, body=body):
                self.unknown_block(body, test)
            case ast.FunctionDef() | ast.ClassDef():
                self.names[node.name] = Function(node, self.module.file)
            case ast.Import() | ast.ImportFrom():
                self.imports(node)

    def imports(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            name = alias.asname or alias.name
            if isinstance(node, ast.Import):
                self.names[name] = Missing(alias.name, alias.name)
                continue
            source = "." * node.level + (node.module or "")
            found = self.evaluator.modules.find(source, self.module.file)
            self.names[name] = (
                Missing(alias.name, source) if found is None else self.evaluator.of_module(found, alias.name)
            )

    def assign(self, target: ast.expr, value: Any, source: ast.expr) -> None:
        match target:
            case ast.Name(id=name):
                self.names[name] = value
            case ast.Attribute(value=owner, attr=name):
                record = self.value(owner)
                if isinstance(record, Record):
                    record.attributes[name] = Placed(value, self.module.location(source))
            case ast.Tuple(elts=targets) | ast.List(elts=targets):
                items = value if isinstance(value, list | tuple) and len(value) == len(targets) else None
                for index, inner in enumerate(targets):
                    why = f"a part of {ast.unparse(source)}"[:80]
                    unknown = Record(why, self.module.location(source)) if isinstance(value, Record) else value
                    self.assign(inner, unknown if items is None else items[index], source)
            case ast.Subscript(value=owner, slice=key):
                container, index = self.value(owner), self.value(key)
                if isinstance(container, dict) and is_known(index) and not isinstance(index, list | dict):
                    container[index] = value

    def branch(self, test: ast.expr, body: Sequence[ast.stmt], orelse: Sequence[ast.stmt]) -> None:
        holds = self.truth(self.value(test))
        if holds is None:
            self.unknown_block(body, test)
            self.unknown_block(orelse, test)
        else:
            self.block(body if holds else orelse)

    def unknown_block(self, body: Sequence[ast.stmt], test: ast.expr) -> None:
        """Evaluate statements that may run: what they set is unknown afterwards."""
        location = self.module.location(test)
        unknown = Unknown(f"set under the condition `{ast.unparse(test)[:60]}`, which only a run decides", location)
        with self.changes(unknown):
            try:
                self.block(body)
            except _ReturnedError:
                raise _ReturnedError(unknown) from None
            except _RaisedError:
                return

    @contextmanager
    def changes(self, unknown: Unknown) -> Iterator[None]:
        """Make every name and attribute that changes inside unknown."""
        names, records = dict(self.names), list(_reachable(self.names))
        before = [(record, dict(record.attributes)) for record in records]
        lists = [(value, list(value)) for value in _lists(names, records)]
        try:
            yield
        finally:
            for items, kept in lists:
                if len(items) != len(kept):  # lists grow only
                    items[:] = [*kept, unknown]
            for name, value in self.names.items():
                if name not in names or names[name] is not value:
                    self.names[name] = unknown
            for record, attributes in before:
                for name, placed in record.attributes.items():
                    is_read = isinstance(placed.value, Record) and placed.value.is_unset
                    if attributes.get(name) is not placed and not is_read:
                        record.attributes[name] = Placed(unknown, placed.location)

    def loop(self, target: ast.expr, items: Any, body: Sequence[ast.stmt], node: ast.For) -> None:
        if not isinstance(items, list | tuple | dict):
            self.unknown_block(body, node.iter)
            return
        for item in items:
            self.evaluator.step(self.module, node)
            self.assign(target, item, node.iter)
            self.block(body)

    def truth(self, value: Any) -> bool | None:
        """Return the truth of a value; None if only a run decides."""
        if isinstance(value, Record):
            return None if value.is_unset else True
        if isinstance(value, Unknown | Missing | Method):
            return None
        return True if isinstance(value, Function) else bool(value)

    def value(self, node: ast.expr) -> Any:
        """Return the value of an expression."""
        self.evaluator.step(self.module, node)
        location = self.module.location(node)
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                return self.names[name] if name in self.names else self.evaluator.of_module(self.module, name)
            case ast.Attribute(value=owner, attr=name):
                return self.attribute(self.value(owner), name, node)
            case ast.Call():
                return self.call(node)
            case ast.List(elts=elements) | ast.Tuple(elts=elements):
                items = [self.value(element) for element in elements if not isinstance(element, ast.Starred)]
                if len(items) < len(elements):
                    return Unknown("a list with unpacked items", location)
                return items if isinstance(node, ast.List) else tuple(items)
            case ast.Dict(keys=keys, values=values):
                return self.mapping(keys, values)
            case ast.BinOp(left=left, op=op, right=right):
                return self.binary(op, self.value(left), self.value(right), node)
            case ast.UnaryOp(op=op, operand=operand):
                return self.unary(op, self.value(operand), node)
            case ast.BoolOp(op=op, values=operands):
                return self.joined(op, operands)
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                return self.compared(op, self.value(left), self.value(right), node)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                holds = self.truth(self.value(test))
                if holds is not None:
                    return self.value(body if holds else orelse)
            case ast.Subscript(value=owner, slice=key):
                container, index = self.value(owner), self.value(key)
                if isinstance(container, dict | list | tuple | str) and is_known(index):
                    try:
                        return container[index]
                    except (KeyError, IndexError, TypeError):
                        pass
            case ast.JoinedStr(values=values):
                parts = [self.value(part.value if isinstance(part, ast.FormattedValue) else part) for part in values]
                if is_known(parts):
                    return "".join(map(str, parts))
        return Unknown(f"the value of `{ast.unparse(node)[:60]}`, which is not evaluated", location)

    def attribute(self, owner: Any, name: str, node: ast.expr) -> Any:
        if isinstance(owner, Record):
            return owner.below(name, self.module.location(node))
        if isinstance(owner, Missing):
            return Missing(name, f"{owner.module}.{owner.name}".strip("."))
        if isinstance(owner, Unknown):
            return owner
        return Method(owner, name)

    def call(self, node: ast.Call) -> Any:
        if isinstance(node.func, ast.Attribute):
            owner = self.value(node.func.value)
            set_value = owner.get(node.func.attr) if isinstance(owner, Record) else None
            if isinstance(owner, Missing):
                called: Any = self.attribute(owner, node.func.attr, node.func)
            else:
                called = Method(owner, node.func.attr) if set_value is None else set_value.value
        else:
            called = self.value(node.func)
        args = [self.value(argument) for argument in node.args if not isinstance(argument, ast.Starred)]
        named: dict[str, Any] = {}
        for keyword in node.keywords:
            value = self.value(keyword.value)
            if keyword.arg is not None:
                named[keyword.arg] = value
            elif isinstance(value, dict):
                named.update({str(key): inner for key, inner in value.items()})
            else:
                self.evaluator.refuse("the arguments that are unpacked here are not known", self.module, keyword.value)
        return self.evaluator.call(called, args, named, self.module, node)

    def mapping(self, keys: Sequence[ast.expr | None], values: Sequence[ast.expr]) -> dict[Any, Any]:
        result: dict[Any, Any] = {}
        for key, node in zip(keys, values, strict=True):
            value = self.value(node)
            if key is not None:
                name = self.value(key)
                result[name if isinstance(name, str | int | float | bool | tuple) else repr(name)] = value
            elif isinstance(value, dict):
                result.update(value)
        return result

    def binary(self, op: ast.operator, left: Any, right: Any, node: ast.AST) -> Any:
        function = _BINARY.get(type(op))
        sizes = [len(side) for side in (left, right) if isinstance(side, list | tuple | str)]
        times = [abs(side) for side in (left, right) if isinstance(side, int)]
        is_small = max(sizes, default=1) * max(times, default=1) <= _MAX_SIZE or not sizes
        if function is not None and is_known(left) and is_known(right) and is_small:
            try:
                return function(left, right)
            except (TypeError, ValueError, ZeroDivisionError, OverflowError):
                pass
        return Unknown("the result of a computation with unknown values", self.module.location(node))

    def unary(self, op: ast.unaryop, value: Any, node: ast.expr) -> Any:
        if isinstance(op, ast.Not):
            holds = self.truth(value)
            return (
                Unknown("the opposite of an unknown value", self.module.location(node)) if holds is None else not holds
            )
        if isinstance(op, ast.USub) and isinstance(value, int | float):
            return -value
        return Unknown("the result of a computation with unknown values", self.module.location(node))

    def joined(self, op: ast.boolop, operands: Sequence[ast.expr]) -> Any:
        """Return ``a and b``, ``a or b``."""
        value: Any = None
        for operand in operands:
            value = self.value(operand)
            holds = self.truth(value)
            if holds is None:
                return Unknown("a condition with unknown values", self.module.location(operand))
            if holds is isinstance(op, ast.Or):
                return value
        return value

    def compared(self, op: ast.cmpop, left: Any, right: Any, node: ast.expr) -> Any:
        unknown = Unknown("a comparison of unknown values", self.module.location(node))
        if isinstance(op, ast.Is | ast.IsNot) and right is None:
            if isinstance(left, Unknown | Missing) or (isinstance(left, Record) and left.is_unset):
                return unknown
            return (left is None) is isinstance(op, ast.Is)
        function = _COMPARE.get(type(op))
        if function is None or not is_known(left) or not is_known(right):
            return unknown
        try:
            return bool(function(left, right))
        except TypeError:
            return unknown


def _reachable(names: Mapping[str, Any]) -> Iterator[Record]:
    """Yield every record that names lead to, once."""
    seen: set[int] = set()
    waiting = list(records_in(dict(names)))
    while waiting:
        record = waiting.pop()
        if id(record) not in seen:
            seen.add(id(record))
            yield record
            waiting += [found for placed in record.attributes.values() for found in records_in(placed.value)]


def _lists(names: Mapping[str, Any], records: Sequence[Record]) -> Iterator[list[Any]]:
    """Yield the lists that names mean, and those that are attributes of the records."""
    yield from (value for value in names.values() if isinstance(value, list))
    yield from (one.value for record in records for one in record.attributes.values() if isinstance(one.value, list))
