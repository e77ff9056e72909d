"""Applies the ``help`` of a plan's finding as a reader would: from its words to the changed plans.

A help is a list of alternatives in a few forms ("set KEY to A or B", "use A", "remove KEY", "did you mean `x`?").
Each alternative that names a key and a value, or a key to remove, is one changed plan.
"""

import copy
import json
import re

import yaml

from pipeproof.diagnostics.finding import BadPlanError
from pipeproof.diagnostics.yaml_tree import parse_text
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.verify.check_plan import check
from tests.plans import BASE

_SAMPLES = {"an integer": "1", "a number": "1", "true or false": "true", "a string": "x"}
GONE = object()
_VERB = r"(?:set|use|remove|write|add|give|list|allow|raise|kind|variant|[a-z_]+\.[a-z_.]+ to)\b"
_REASON = r",? (?:the smallest|if|which is) .*|: (?:after|then|memory|[\d.]+ (?:B|KiB|MiB|GiB)) .*"
_CLAUSES = re.compile(rf", or (?:leave it out)?|{_REASON}|; |\? | or (?={_VERB})")
_VALUE = r"`[^`]*`|[^\s,]+"
_VALUES = re.compile(rf"(?:at (?:most|least) )?((?:{_VALUE})(?:(?:, | or | to )(?:{_VALUE}))*)(?: at least| or more)?$")
_PLAIN_KEY = r"[a-z_0-9]+(?:\.[a-z_0-9]+|\[\d+\])*"


def plan_findings(data, file="plan"):
    """The findings of a plan, as if it was in ``file``, and the map of its text."""
    tree = parse_text(json.dumps(data, indent=1), str(file))
    assert not tree.problems, tree.problems
    try:
        return check(plan_from_dict(tree.data, source=tree.source)).findings, tree.source
    except BadPlanError as error:
        return error.findings, tree.source


def path_of(finding, source):
    """The longest key path that the finding points at."""
    found = [path for table in (source.keys, source.values) for path, at in table.items() if at == finding.location]
    return max(found, key=len, default=())


def changed_plans(finding, data, source):
    """``(words, plan)`` for each alternative of the help that can be applied; none of it for prose."""
    path = path_of(finding, source)
    for clause in _CLAUSES.split(finding.help or _from_message(finding.message)):
        for edits in _edits(clause.strip(), path, data, finding):
            plan = copy.deepcopy(data)
            if all(_put(plan, key, value) for key, value in edits):
                yield clause, plan


def _from_message(message):
    """The fix in a message without a help: ``must be A, B or C``."""
    match = re.search(r"must be (?:one of )?(.*), found ", message)
    return "write " + re.sub("less than .*", "0", _SAMPLES.get(match[1], match[1])) if match else ""


def _edits(clause, path, data, finding):
    """Lists of (key, value) of one alternative."""
    if clause == "remove the quotes":
        yield [(path, int(_get(data, path)))]
    elif match := re.fullmatch(r"add `([\w.]+)` to one of the \d+ stages", clause):
        yield from ([(("stages", i), [*stage, match[1]])] for i, stage in enumerate(data["stages"]))
    elif match := re.fullmatch(r"remove `([\w.]+)` from one of them", clause):
        held = [(i, stage) for i, stage in enumerate(data["stages"]) if match[1] in stage]
        yield from ([(("stages", i), [name for name in stage if name != match[1]])] for i, stage in held)
    elif match := re.match(r"add `(\w+)`: ", clause):
        choices = re.search(r": one of (.*)$", clause)
        base = BASE if not path else BASE.get(path[0], {})
        value = base.get(match[1]) if not choices else re.split(", | or ", choices[1])[0]
        yield [((*path, match[1]), 1 if value is None else value)]
    elif match := re.fullmatch(rf"(?:set )?({_PLAIN_KEY}|it) to (.*)", clause):
        yield from ([(_key(match[1], path, data), value)] for value in _values(match[2]))
    elif match := re.fullmatch(
        r"(?:set|add|use|write|give)(?: for example)? `?(\{?[a-z_.]+: [^`]*)`?(?: to [a-z_.]+)?", clause
    ):
        entry = yaml.safe_load(match[1])
        section = path if isinstance(_get(data, path), dict) else path[:-1]
        if match_to := re.search(r" to ([a-z_.]+)$", clause):
            section = tuple(match_to[1].split("."))
        yield [
            ((*section, *key.split(".")) if "." not in key else tuple(key.split(".")), v) for key, v in entry.items()
        ]
    elif match := re.fullmatch(r"(?:use |set )?(kind|variant|backend)s? (.*)", clause):
        yield from ([(_key(match[1], path, data), value)] for value in _values(match[2]))
    elif match := re.fullmatch(r"(?:use|write|allow|give) (.*)", clause):
        old = _get(data, path)
        for value in _values(match[1]):
            yield [(path, _resized(old, value) if isinstance(old, list) and isinstance(value, int) else value)]
    elif match := re.fullmatch(rf"remove (?:the )?(?:key|entry|it|one of (?:them|the two)|(`?{_PLAIN_KEY}`?))", clause):
        yield [(_key((match[1] or "it").strip("`"), path, data), GONE)]
    elif match := re.match(r"did you mean (`[^`]*`(?:(?:, | or )`[^`]*`)*)", clause):
        for name in re.findall(r"`([^`]*)`", match[1]):
            if finding.code == "PP102":
                to = tuple(name.split(".")) if "." in name else (*path[:-1], name)
                kept = [] if _get(data, to) is not None else [(to, _get(data, path))]
                yield [(path, GONE), *kept]
            else:
                yield [(path, name)]


def _resized(old, size):
    return (old + old[-1:] * size)[:size]


def _values(text):
    match = _VALUES.match(text)
    if match is None:
        return
    for word in re.findall(_VALUE, re.sub(r",| or | to ", " ", match[1])):
        try:
            yield yaml.safe_load(word.strip("`"))
        except yaml.YAMLError:
            return


def _key(name, path, data):
    """The path that a name means: the finding's own, a dotted one, a sibling, or the only key of this name."""
    if name == "it":
        return path
    parts = tuple(int(part) if part.isdecimal() else part for part in re.split(r"[.\[\]]+", name) if part)
    if len(parts) > 1:
        return parts
    if path and path[-1] == name:
        return path
    section = path if isinstance(_get(data, path), dict) else path[:-1]
    return (*section, name)


def _get(data, path):
    for part in path:
        if (isinstance(data, dict) and part in data) or (
            isinstance(data, list) and isinstance(part, int) and part < len(data)
        ):
            data = data[part]
        else:
            return None
    return data


def _put(plan, path, value):
    """Set or remove a value; False if there is nothing to remove, or no section for it."""
    if not path:
        return False
    *sections, last = path
    for part in sections:
        if isinstance(plan, dict):
            if part == "transport" and isinstance(plan.get(part), str):  # short for both directions
                plan[part] = dict.fromkeys(("forward", "backward"), plan[part])
            plan = plan.setdefault(part, {})
        elif isinstance(plan, list) and isinstance(part, int) and part < len(plan):
            plan = plan[part]
        else:
            return False
    if value is not GONE:
        if isinstance(plan, dict) or (isinstance(plan, list) and isinstance(last, int) and last < len(plan)):
            plan[last] = value
            return True
        return False
    if (isinstance(plan, dict) and last in plan) or (
        isinstance(plan, list) and isinstance(last, int) and last < len(plan)
    ):
        del plan[last]
        return True
    return False


_OP = r"(?:WAIT|FREE)\(\w[\w.:/]*\)|\d+[A-Z][\w.:/]*"


def changed_programs(finding, text):
    """Programs with the operations of the help added, removed or moved; an added one at each position of its rank."""
    lines = [re.findall(r"\S+?\{[^}]*\}|\S+", line) for line in text.splitlines()]
    for clause in re.split(r", or |, at the latest .*", finding.help or ""):
        if match := re.search(r"there is no attribute `(\w+)`", finding.message):
            yield text.replace(match[1], re.search("`(.*)`", clause)[1])
        elif match := re.match(r"remove `(\w+)`$", clause):
            yield re.sub(rf" ?{match[1]}=\w+", "", text)
        ops = re.findall(_OP, clause)
        named = re.search(r"rank (\d+)", clause) or re.search(r"rank (\d+)", finding.message)
        own = next((line for line in lines if line[:2] == ["rank", f"{named[1]}:"]), None) if named else None
        if not ops or own is None:
            continue
        change = re.match(r"(?:on rank \d+, )?(\w+)", clause)[1]
        at = {op: next((i for i, word in enumerate(own) if word.split("{")[0] == op), None) for op in ops}
        if change == "remove":
            yield "\n".join(" ".join(_without(line, ops)) for line in lines)
        else:
            for new in _programs(change, clause, ops, own, at):
                yield "\n".join(" ".join(new if line is own else line) for line in lines)


def _without(line, ops):
    """A program without one of each operation, and of each wait for it."""
    names = [word.split("{")[0] for word in line]
    gone = {names.index(op) for name in ops for op in (name, f"WAIT({name})") if op in names}
    return [word for i, word in enumerate(line) if i not in gone]


def _programs(change, clause, ops, own, at):
    """The programs of one rank with an operation moved, exchanged or added."""
    if change in ("move", "put", "post"):
        target = ops[1] if len(ops) > 1 else f"WAIT({ops[0]})"
        moved = own[at[ops[0]]] if at[ops[0]] is not None else ops[0]
        rest = [word for i, word in enumerate(own) if i != at[ops[0]]]
        where = next(i for i, word in enumerate(rest) if word.split("{")[0] == target) + (" behind " in clause)
        yield [*rest[:where], moved, *rest[where:]]
    elif change == "exchange":
        order = list(range(len(own)))
        order[at[ops[0]]], order[at[ops[1]]] = at[ops[1]], at[ops[0]]
        yield [own[i] for i in order]
    elif change in ("add", "end"):
        added = ops[:1] if re.search(" (after|before) ", clause) or change == "end" else ops
        yield from ([*own[:i], *added, *own[i:]] for i in range(len(own), 1, -1))


def still_there(finding, findings, source=None, before=None):
    """True if a finding is among others: its message, or at its key one with other numbers."""
    path = path_of(finding, before) if source else None
    return any(
        other.code == finding.code
        and _without_numbers(other.message) == _without_numbers(finding.message)
        and (other.message == finding.message or (source is not None and path_of(other, source) == path))
        for other in findings
    )


def _without_numbers(text):
    """A message without its numbers, except those in names."""
    return re.sub(r"`[^`]*`|\d+", lambda match: match[0] if match[0][0] == "`" else "#", text)
