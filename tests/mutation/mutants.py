"""A mutant: one source file with one small change in its syntax tree.

The changes are those that a tired programmer makes: another comparison, a
condition negated, a number off by one, a statement left out. Texts are
left alone, as are docstrings, annotations and the ``RuleDoc`` pages: what a
message says is held by goldens, and a misspelt word is not a wrong verdict.
"""

import ast
import copy
from dataclasses import dataclass

COMPARISONS = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.Div: ast.Mult,
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "minimum": "maximum", "maximum": "minimum"}
TEXT_CALLS = frozenset({"RuleDoc"})
"""Calls whose arguments are documentation."""


@dataclass(frozen=True)
class Mutant:
    """One change of one file.

    ``place`` is the function that the change is in (``<module>`` outside of
    any); together with ``change`` and ``number`` (which of the equal changes
    in that function it is) it names the mutant whatever line it stands on. Lines
    are those of the code that is changed.
    """

    file: str
    place: str
    change: str
    number: int
    line: int
    last_line: int
    at_import: bool
    """True if it changes code that runs when the module is imported, and so affects any test."""
    source: str
    """The whole file, changed."""

    @property
    def name(self):
        """Name in the list of explained survivors; unique within a file."""
        suffix = f" #{self.number}" if self.number else ""
        return f"{self.place}: {self.change}{suffix}"


def mutants_of(file, source):
    """Every mutant of a file, in the order of their lines."""
    tree = ast.parse(source)
    finder = _Finder()
    finder.visit(tree)
    seen = {}
    found = []
    for site in sorted(finder.sites, key=lambda site: (site.node.lineno, site.node.col_offset, site.change)):
        number = seen.get((site.place, site.change), 0)
        seen[site.place, site.change] = number + 1
        text = _with_change(tree, site)
        lines = site.node.lineno, site.node.end_lineno
        found.append(Mutant(file, site.place, site.change, number, *lines, site.at_import, text))
    return found


@dataclass(frozen=True)
class _Site:
    """Place of a change: the parent's field (and index in it) that gets ``replacement``."""

    place: str
    at_import: bool
    change: str
    node: ast.AST
    parent: ast.AST
    field: str
    index: int | None
    replacement: ast.AST


class _Finder(ast.NodeVisitor):
    """Walks the tree with the name of the function it is in, and notes every change that can be made."""

    def __init__(self):
        self.sites = []
        self._names = []
        self._depth = 0
        self._parent = (None, "", None)

    def visit(self, node):
        if self._is_text(node):
            return
        self._changes(node)
        named = isinstance(node, ast.FunctionDef | ast.ClassDef)
        in_function = isinstance(node, ast.FunctionDef | ast.Lambda)
        self._depth += in_function
        if named:
            self._names.append(node.name)
        for field, value in ast.iter_fields(node):
            if field in {"annotation", "returns", "decorator_list", "type_params"}:
                continue
            children = value if isinstance(value, list) else [value]
            for index, child in enumerate(children):
                if isinstance(child, ast.AST):
                    outer = self._parent
                    self._parent = (node, field, index if isinstance(value, list) else None)
                    self.visit(child)
                    self._parent = outer
        self._depth -= in_function
        if named:
            self._names.pop()

    @staticmethod
    def _is_text(node):
        if isinstance(node, ast.JoinedStr | ast.Import | ast.ImportFrom):
            return True
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return True
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return True
        if isinstance(node, ast.keyword) and node.arg == "strict":
            return True  # of zip: states what only a bug of ours could break
        return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in TEXT_CALLS

    def _note(self, node, change, replacement):
        parent, field, index = self._parent
        place = ".".join(self._names) or "<module>"
        self.sites.append(_Site(place, not self._depth, change, node, parent, field, index, replacement))

    def _changes(self, node):
        match node:
            case ast.Compare():
                for i, operator in enumerate(node.ops):
                    new = copy.deepcopy(node)
                    new.ops[i] = COMPARISONS[type(operator)]()
                    self._swap(node, new)
            case ast.BinOp() if type(node.op) in OPERATORS and not _is_string(node):
                new = copy.deepcopy(node)
                new.op = OPERATORS[type(node.op)]()
                self._swap(node, new)
            case ast.AugAssign() if type(node.op) in OPERATORS:
                new = copy.deepcopy(node)
                new.op = OPERATORS[type(node.op)]()
                self._swap(node, new)
            case ast.BoolOp():
                new = copy.deepcopy(node)
                new.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
                self._swap(node, new)
            case ast.UnaryOp(op=ast.Not() | ast.Invert()):
                self._swap(node, node.operand)
            case ast.Constant(value=bool()):
                self._swap(node, ast.Constant(not node.value))
            case ast.Constant(value=int()):
                self._swap(node, ast.Constant(node.value + 1))
            case ast.Name(id=name) if name in NAMES:
                self._swap(node, ast.Name(NAMES[name], ast.Load()))
            case ast.Attribute(attr=name) if name in NAMES:
                self._swap(node, ast.Attribute(node.value, NAMES[name], ast.Load()))
            case ast.If() | ast.While() | ast.IfExp() if not isinstance(node.test, ast.Compare):
                new = copy.deepcopy(node)
                new.test = ast.UnaryOp(ast.Not(), node.test)
                self._note(node.test, f"{_text(node.test)} -> {_text(new.test)}", new)
            case ast.Continue():
                self._swap(node, ast.Break())
            case ast.Break():
                self._swap(node, ast.Continue())
            case ast.Expr(value=ast.Yield() | ast.YieldFrom()):
                # still a generator, one that does not yield this
                self._note(node, f"delete {_text(node)}", ast.parse("if False: yield").body[0])
            case ast.Expr():
                self._note(node, f"delete {_text(node)}", ast.Pass())
            case ast.comprehension() if node.ifs:
                for i, test in enumerate(node.ifs):
                    new = copy.deepcopy(node)
                    del new.ifs[i]
                    self._note(test, f"delete filter {_text(test)}", new)
            case ast.Assign(targets=[ast.Subscript() | ast.Attribute()]):
                self._note(node, f"delete {_text(node)}", ast.Pass())
            case ast.Return(value=ast.expr()) if not isinstance(node.value, ast.Constant | ast.JoinedStr):
                self._swap(node, ast.Return(ast.Constant(None)))
            case ast.Raise():
                self._note(node, f"delete {_text(node)}", ast.Pass())

    def _swap(self, node, new):
        self._note(node, f"{_text(node)} -> {_text(new)}", new)


def _is_string(node):
    sides = (node.left, node.right)
    return any(
        isinstance(s, ast.JoinedStr) or (isinstance(s, ast.Constant) and isinstance(s.value, str)) for s in sides
    )


def _text(node):
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 70 else f"{text[:67]}..."


def _with_change(tree, site):
    """The source with one change; the tree is as before afterwards."""
    old = getattr(site.parent, site.field)
    if site.index is None:
        target = old
        setattr(site.parent, site.field, site.replacement)
    else:
        target = old[site.index]
        old[site.index] = site.replacement
    text = ast.unparse(tree)
    if site.index is None:
        setattr(site.parent, site.field, target)
    else:
        old[site.index] = target
    return text
