"""Every code with its documentation, whichever room reports it; what ``pipeproof explain`` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeproof.comm.lower import LOWERING_CODES
from pipeproof.exec.codes import RUN_CODES
from pipeproof.exec.fleet.codes import FLEET_CODES
from pipeproof.exec.rehearse.codes import REHEARSAL_CODES
from pipeproof.interop.codes import IMPORT_CODES
from pipeproof.interop.hang.codes import HANG_CODES
from pipeproof.interop.record.codes import RECORD_CODES
from pipeproof.schedule.formats.inexpressible import INEXPRESSIBLE
from pipeproof.schedule.generators.solve import SOLVER_MISSING
from pipeproof.sim.errors import NO_ROOM, NOT_FAST, UNFINISHED
from pipeproof.specs.codes import PLAN_FILE_CODES, RuleDoc
from pipeproof.specs.profile import PROFILE_CODES
from pipeproof.specs.schedule_file import SCHEDULE_FILE_CODES
from pipeproof.stages.describe.partition import PARTITION_CODES
from pipeproof.stages.own.codes import OWN_CODES
from pipeproof.state.aoa.codes import AOA_CODES
from pipeproof.state.codes import STATE_CODES
from pipeproof.state.flex.codes import FLEX_CODES
from pipeproof.state.names.codes import NAMES_CODES
from pipeproof.state.reshard.codes import PROOF_CODES
from pipeproof.state.reshard.refused import REFUSED_CODES
from pipeproof.verify.baseline import BASELINE_CODES
from pipeproof.verify.registry import RULES
from pipeproof.verify.suppress import SUPPRESSION_CODES

if TYPE_CHECKING:
    from rich.console import Console


def all_docs() -> tuple[RuleDoc, ...]:
    """The documentation of every code that any command can report, in the order of the codes."""
    docs = (
        *PLAN_FILE_CODES,
        *SCHEDULE_FILE_CODES,
        *PROFILE_CODES,
        *PARTITION_CODES,
        *LOWERING_CODES,
        INEXPRESSIBLE,
        SOLVER_MISSING,
        *(rule.doc for rule in RULES),
        *SUPPRESSION_CODES,
        *BASELINE_CODES,
        NOT_FAST,
        NO_ROOM,
        UNFINISHED,
        *RUN_CODES,
        *REHEARSAL_CODES,
        *FLEET_CODES,
        *OWN_CODES,
        *IMPORT_CODES,
        *HANG_CODES,
        *RECORD_CODES,
        *STATE_CODES,
        *PROOF_CODES,
        *AOA_CODES,
        *NAMES_CODES,
        *REFUSED_CODES,
        *FLEX_CODES,
    )
    return tuple(sorted(docs, key=lambda doc: doc.code))


def find_doc(code: str) -> RuleDoc | None:
    """The documentation of a code, whatever its case; None if there is no such code."""
    return next((doc for doc in all_docs() if doc.code == code.upper()), None)


def render_doc(doc: RuleDoc, console: Console) -> None:
    """Print one page: what it means, a wrong and a right example."""
    from rich.padding import Padding
    from rich.text import Text

    console.print(f"[bold]{doc.code}[/] ({doc.severity}): {doc.title}\n")
    console.print(doc.explanation)
    for title, example in (("wrong", doc.wrong), ("right", doc.right)):
        console.print(f"\n[bold]{title}[/]")
        console.print(Padding(Text(example), (0, 2)))
