"""The documentation of all codes, which ``pipeproof --explain`` prints."""

from __future__ import annotations

from pipeproof.comm.lower import LOWERING_CODES
from pipeproof.diagnostics.finding import RuleDoc
from pipeproof.exec.monitor.monitor_codes import MONITOR_CODES
from pipeproof.exec.store.run_codes import PLACEMENT_CODES, REHEARSAL_CODES, RUN_CODES
from pipeproof.interop.hang.hang_codes import HANG_CODES
from pipeproof.interop.importers.import_codes import IMPORT_CODES
from pipeproof.interop.profiles.profile_codes import TRACE_PROFILE_CODES
from pipeproof.interop.traces.trace_codes import RECORD_CODES
from pipeproof.schedule.formats.inexpressible import INEXPRESSIBLE
from pipeproof.schedule.generators.solve import SOLVER_MISSING
from pipeproof.sim.outcome import NO_ROOM, NOT_FAST, UNFINISHED
from pipeproof.specs.plan import PLAN_FILE_CODES
from pipeproof.specs.profile_file import PROFILE_CODES
from pipeproof.specs.schedule import SCHEDULE_FILE_CODES
from pipeproof.stages.describe.partition import PARTITION_CODES
from pipeproof.state.reshard.reshard_codes import PROOF_CODES, REFUSED_CODES
from pipeproof.state.state_codes import STATE_CODES
from pipeproof.verify.registry import RULES, SUPPRESSION_CODES


def all_docs() -> tuple[RuleDoc, ...]:
    """Return the documentation of every code that a command can report, in the order of the codes."""
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
        NOT_FAST,
        NO_ROOM,
        UNFINISHED,
        *RUN_CODES,
        *REHEARSAL_CODES,
        *PLACEMENT_CODES,
        *IMPORT_CODES,
        *HANG_CODES,
        *MONITOR_CODES,
        *RECORD_CODES,
        *TRACE_PROFILE_CODES,
        *STATE_CODES,
        *PROOF_CODES,
        *REFUSED_CODES,
    )
    return tuple(sorted(docs, key=lambda doc: doc.code))
