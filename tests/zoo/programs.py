"""Subjects from program texts, and cases made of a text and changes of it."""

import re
from textwrap import dedent

from pipeproof.schedule.formats.text_form import parse_program
from pipeproof.verify.subject import graph_subject
from tests.zoo.case import Case

SHORT = re.compile(r"(\S+?)!(\{[^}]*\})?")


def program(text):
    """The programs of a text, checked alone; ``X!`` is short for posting X and waiting for it at once."""
    return graph_subject(parse_program(SHORT.sub(r"\1\2 WAIT(\1)", dedent(text))).graph())


def edited(text, *changes):
    """The text with each (old, new) replaced everywhere; every old must occur."""
    text = re.sub("(?<=[^ \n]) +", " ", text)
    for old, new in changes:
        assert old in text, f"{old!r} is not in the program"
        text = text.replace(old, new)
    return text


def of_program(id, mutation, text, *changes, kills, ran=""):
    """A case whose right form is a program text, and whose mutant is the same text with the changes."""
    return Case(id, mutation, lambda: program(text), lambda: program(edited(text, *changes)), kills, ran)
