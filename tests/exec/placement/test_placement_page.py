"""The examples of docs/placement.md are what the code prints."""

import io
import re

import pytest
import yaml
from rich.console import Console

from pipeproof.exec.placement.link_kinds import LinkKind
from pipeproof.exec.placement.placement_console import render_placement
from pipeproof.exec.placement.placement_report import placement_report
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.verify.subject import make_subject
from tests.exec.placement.invented_hosts import blocks, cyclic, places
from tests.exec.processes import REPOSITORY

PAGE = REPOSITORY / "docs" / "placement.md"


@pytest.mark.parametrize(("title", "hosts"), [("as planned", blocks(8, 2)), ("cyclic", cyclic(8, 2))])
def test_examples(title, hosts, request):
    text = PAGE.read_text()
    plan = yaml.safe_load(re.search(r"```yaml\n(.*?)```", text, re.DOTALL)[1])
    console = Console(file=io.StringIO(), width=120)
    render_placement(placement_report(make_subject(plan_from_dict(plan)), places(hosts)), None, console)
    block = re.compile(rf'(```text title="{title}"\n)(.*?)(```)', re.DOTALL)
    printed = re.sub(r" +$", "", console.file.getvalue(), flags=re.MULTILINE)
    if request.config.getoption("--update-golden"):
        PAGE.write_text(block.sub(lambda match: match[1] + printed + match[3], text))
    else:
        assert block.search(text)[2] == printed


def test_every_kind_of_link_is_explained():
    table = re.search(r"\| in the table \| two ranks \|\n\|.*\n((?:\|.*\n)+)", PAGE.read_text())[1]
    assert [row.split("|")[1].strip() for row in table.splitlines()] == [*LinkKind]
