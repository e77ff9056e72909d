"""The documents of the plan-file codes: each wrong example gives its code, each right one gives none."""

import re

import pytest

from pipeproof.diagnostics.finding import BadPlanError
from pipeproof.specs.load_plan import load_plan
from pipeproof.specs.plan import PLAN_FILE_CODES
from tests.specs.plans import EXAMPLE

DOCS = {doc.code: doc for doc in PLAN_FILE_CODES}


def test_family_is_complete_and_in_order():
    assert list(DOCS) == [f"PP{number}" for number in range(100, 110)]
    for doc in PLAN_FILE_CODES:
        assert doc.severity == "error"
        assert doc.title[0].islower()
        assert doc.title[-1] != "."
        assert doc.explanation.endswith(".")
        assert "  " not in doc.explanation


def whole_plan(fragment):
    """The example plan with the sections of ``fragment`` in place of its own."""
    replaced = set(re.findall(r"^(\w+):", fragment, re.MULTILINE))
    sections = re.split(r"^(?=\w)", EXAMPLE, flags=re.MULTILINE)
    kept = [section for section in sections if section.split(":")[0] not in replaced]
    return "".join([*kept, fragment, "\n"])


@pytest.mark.parametrize("code", [code for code in DOCS if code != "PP100"])
def test_examples(code, tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text(whole_plan(DOCS[code].wrong))
    with pytest.raises(BadPlanError) as caught:
        load_plan(path)
    assert {finding.code for finding in caught.value.findings} == {code}
    path.write_text(whole_plan(DOCS[code].right))
    load_plan(path)
