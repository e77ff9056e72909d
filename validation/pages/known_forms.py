"""The closed forms of every kind of schedule; tests compare each with the schedule on a grid of sizes and times."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from closed_forms import ClosedForm
from sizes_and_times import Case

from pipeproof.schedule.programs import Time

_PEAK, _PEAK_AT_I = "peak activations of rank r", "peak activations of rank r, freed by I"
_UNEVEN: tuple[Time, ...] = (1, 2, 1, 1)


def _forms_of(kind: str) -> tuple[ClosedForm, ...]:
    """Return the forms of one kind; () if there is none."""
    case = Case(kind)
    match kind:
        case "gpipe":
            return (
                ClosedForm("makespan", "(m + p - 1) * (tf + tb) + 2 * (p - 1) * c"),
                ClosedForm(
                    "makespan", "sum(F) + (m - 1) * max(F) + sum(B) + (m - 1) * max(B)", "c == 0",
                    even=False, inside=replace(case, f=_UNEVEN), outside=replace(case, f=_UNEVEN, c=1),
                ),
                ClosedForm(_PEAK, "m", even=False),
            )  # fmt: skip
        case "1f1b":
            return (
                ClosedForm("makespan", "(m + p - 1) * (tf + tb) + 2 * c * (p - 1 + (m - 1) * (p - 1) // p)",
                           inside=replace(case, c=1)),
                ClosedForm(
                    "makespan", "max(sum(F[:r]) + m * (F[r] + B[r]) + sum(B[:r]) for r in range(p))",
                    relation=">=", even=False, inside=replace(case, f=(1, 1, 1, 2)), outside=replace(case, f=_UNEVEN),
                ),
                ClosedForm(_PEAK, "min(m, p - r)", even=False),
            )  # fmt: skip
        case "eager_1f1b":
            return (
                ClosedForm("makespan", "(m + p - 1) * (tf + tb) + 2 * (p - 1) * c", "2 * c <= tf + tb",
                           inside=replace(case, c=1), outside=replace(case, c=2)),
                ClosedForm(_PEAK, "min(m, 2 * (p - 1 - r) + 1)", even=False),
            )  # fmt: skip
        case "interleaved":
            rounds = (("g", "m // max(1, m // p)"),)
            return (
                ClosedForm("makespan", "(v * m + p - 1 + (v - 1) * max(0, p - m)) * (tf + tb)", "c == 0",
                           outside=replace(case, c=1)),
                ClosedForm(_PEAK, "min(v * m, (v - 1) * g + 2 * (p - 1 - r) + 1)", even=False, where=rounds),
            )  # fmt: skip
        case "looped_bfs":
            two = replace(case, v=2)
            return (
                ClosedForm("makespan", "(v * m + p - 1) * (tf + tb)", "m >= p and c == 0",
                           inside=two, outside=replace(two, m=2)),
                ClosedForm(_PEAK, "v * m", even=False, inside=two),
            )  # fmt: skip
        case "zb_h1":
            return _zb_h1(case)
        case "zb_h2":
            return _zb_h2(case)
        case "interleaved_zb":
            return (
                ClosedForm("makespan", "v * m * (tf + ti + tw) + (p - 1) * max(tf, ti, tf + ti - tw)",
                           "m >= p and c == 0", outside=replace(case, m=2)),
                ClosedForm("largest peak of a rank", "v * p", "m % p == 0", even=False, outside=replace(case, m=10)),
            )  # fmt: skip
        case "zb_v":
            return _zb_v(case)
        case "v_half":
            return _controlled(case, "p // 2 + 1")
        case "v_min":
            return _controlled(case, "(p + 4) // 3")
        case "dualpipe_v":
            return (
                ClosedForm(
                    "makespan",
                    "2 * p * tf + max(p * tf, (p - 1) * ti) + (2 * m - p - 2) * D + 2 * tb + p * ti + tw"
                    " + (p - 1) * max(ti, tw)",
                    "c == 0 and D >= max(tf, tb)",
                    inside=replace(case, d=2), outside=replace(case, d=Fraction(3, 2)),
                ),
                ClosedForm(_PEAK, "2 * p + 1", even=False),
            )  # fmt: skip
        case "dualpipe":
            return (
                ClosedForm(
                    "makespan",
                    "p * tf + max(q * tf, (q - 1) * ti) + (m - q - 2) * D + 2 * tb + q * ti + tw"
                    " + (q - 1) * max(ti, tw)",
                    "c == 0 and D >= max(tf, tb)", where=(("q", "p // 2"),),
                    inside=replace(case, p=6, m=12, d=2), outside=replace(case, p=6, m=12, d=Fraction(3, 2)),
                ),
                ClosedForm(_PEAK, "p + 1", even=False),
            )  # fmt: skip
        case "chimera":
            return _chimera(case)
        case "optimal":
            return (
                ClosedForm(
                    "makespan", "max(sum(F[:r]) + m * (F[r] + B[r]) for r in range(p))", "v == 1",
                    relation=">=", even=False,
                    inside=replace(case, memory_limit=4), outside=replace(case, memory_limit=2),
                ),
            )  # fmt: skip
        case "seq1f1b":
            cut = replace(case, k=2)
            return (
                ClosedForm("makespan", "(m * k + p - 1) * (tf + tb) / k", "c == 0",
                           inside=cut, outside=replace(cut, c=1)),
                ClosedForm(_PEAK, "min(m * k, p - r + k - 1)", even=False, inside=cut),
            )  # fmt: skip
        case _:
            return ()


def _zb_h1(case: Case) -> tuple[ClosedForm, ...]:
    return (
        ClosedForm("makespan", "m * (tf + ti + tw) + (p - 1) * max(tf, ti, tf + ti - tw)", "m >= p and c == 0",
                   outside=replace(case, m=2)),
        ClosedForm("span of rank r", "m * (tf + ti + tw) + (p - 1 - r) * max(ti, tf + ti - tw)", "m >= p and c == 0",
                   outside=replace(case, c=1)),
        ClosedForm(_PEAK, "min(m, p)", "m >= p", even=False),
        ClosedForm(_PEAK_AT_I, "min(m, p - r)", even=False),
    )  # fmt: skip


def _zb_h2(case: Case) -> tuple[ClosedForm, ...]:
    spare = (("n", "p - 1"), ("s", "min(m - p, n)"))
    return (
        ClosedForm(
            "makespan",
            "m * (tf + ti + tw) + max(n * tf + (n - s) * max(0, ti - tw), n * ti - s * tf, s * tf + (n - s) * ti,"
            " n * (tf + ti) - (n + s) * tw)",
            "m >= p and c == 0", where=spare, outside=replace(case, c=1),
        ),
        ClosedForm("span of rank r", "m * (tf + ti + tw)",
                   "m >= 2 * p - 1 and ti <= tf and tf + ti <= 2 * tw and c == 0", outside=replace(case, m=6)),
        ClosedForm(_PEAK, "min(m, p + min(p - 1 - r, s) + min(r, s))", "m >= p", even=False, where=spare),
        ClosedForm(_PEAK_AT_I, "p - r + min(p - 1 - r, s)", "m >= p", even=False, where=spare),
    )  # fmt: skip


def _zb_v(case: Case) -> tuple[ClosedForm, ...]:
    return (
        ClosedForm("makespan", "max(6 * m + p - 1, 4 * m + 4 * p - 2) * tf", "tf == ti == tw and c == 0",
                   outside=replace(case, w=10)),
        ClosedForm(
            "makespan",
            "2 * m * (tf + ti + tw) + max(n * ti, 2 * n * (ti - tw), max(tf, ti) + (n - 1) * tw,"
            " (2 * n - 1) * tf - (n - 1) * ti + max(0, tf - ti - tw) + n * max(0, ti - 2 * tw))",
            "m >= 2 * p - 1 and p >= 2 and c == 0", where=(("n", "p - 1"),),
            inside=replace(case, w=10), outside=replace(case, m=4),
        ),
        ClosedForm("span of rank r", "6 * m * tf", "tf == ti == tw and m >= 2 * p - 1 and c == 0",
                   outside=replace(case, m=6)),
        ClosedForm(_PEAK, "2 * p", "m >= 2 * p - 1", even=False, outside=replace(case, m=4)),
    )  # fmt: skip


def _controlled(case: Case, num_ahead: str) -> tuple[ClosedForm, ...]:
    """Return the forms of V-Half and V-Min, which differ in the number of micro-batches in flight."""
    ahead, equal = (("N", num_ahead),), "tf == ti == tw and c == 0"
    return (
        ClosedForm("makespan", "(6 * m + 3 * p - 1 - 2 * N + max(0, 3 * p - 4 * N)) * tf", f"m > N and {equal}",
                   where=ahead, outside=replace(case, i=3)),
        ClosedForm("makespan", "max(4 * p - 1 + 2 * m, 3 * p - 1 + 4 * m) * tf", f"m <= N and {equal}",
                   where=ahead, inside=replace(case, m=2), outside=replace(case, m=4)),
        ClosedForm("largest peak of a rank", "2 * min(m, N)", even=False, where=ahead),
        ClosedForm(_PEAK, "2 * N", "m >= p", even=False, where=ahead, outside=replace(case, m=1)),
    )  # fmt: skip


def _chimera(case: Case) -> tuple[ClosedForm, ...]:
    return (
        ClosedForm("makespan", "m * (tf + tb) + (p - 2) * (max(tf, tb) + (m // p - 1) * abs(tb - tf))",
                   "m % p == 0 and c == 0", outside=replace(case, m=6)),
        ClosedForm("makespan", "p * (tf + tb) + 2 * (ceil(m / 2) - 1) * max(tf, tb)", "m <= p and c == 0",
                   inside=replace(case, m=3), outside=replace(case, m=5)),
        ClosedForm(_PEAK, "min(m, p, p // 2 + 1 + min(r, p - 1 - r))", "m >= p", relation="<=", even=False),
    )  # fmt: skip


def closed_forms(kind: str) -> tuple[ClosedForm, ...]:
    """Return the forms of a kind, each with a case inside its condition."""
    return tuple(replace(form, inside=form.inside or Case(kind)) for form in _forms_of(kind))
